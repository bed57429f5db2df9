"""An object detector over HTTP, for rewards whose detector needs an environment of its own. A helper, not a reward.

The benchmark's mmdet checkpoint runs on Python 3.10 and older only; a small server there answers in JSON:

    POST {address}/detect
    {"schema": 1, "id": "...", "image": "<base64 of a PNG>"}
    200 {"schema": 1, "id": "...", "objects": [{"label": "dog", "confidence": 0.97,
            "box": [left, top, right, bottom], "mask": "<base64 of a PNG>" or null}]}
    200 {"schema": 1, "id": "...", "error": "why this image could not be looked at"}

Labels are GenEval's, boxes pixels with right and bottom exclusive, a mask is an image of the same size that is 0
outside of the object. The id is the request's: an answer to another request is refused. PNG loses nothing.
"""

from __future__ import annotations

import base64
import io
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flowrl.rewards._detection.detectors import Detection, DetectionError
from PIL import Image

from flowrl.core.errors import Remedy
from flowrl.media.media import UNREADABLE, opened
from flowrl.reward import RewardError

SCHEMA = 1
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


class Unreachable(RuntimeError):
    """The server does not answer; asking again later may help."""


@dataclass(slots=True)
class RemoteDetector:
    """Objects of an image as a server sees them.

    Raises (when called):
        DetectionError: the server says that it cannot look at this image.
        RewardError: the server does not speak this schema.
        Unreachable: no answer after `tries`.
    """

    address: str
    timeout_s: float = 60.0
    tries: int = 4
    backoff_s: float = 0.5
    _client: Any = field(init=False, repr=False)
    """One for all images: it keeps the connection."""

    def __post_init__(self) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise RewardError(
                f"a detector at {self.address} needs a package that is not installed ({error.name})",
                Remedy(command="pip install 'flowrl[serve]'"),
            ) from error
        self._client = httpx.Client(timeout=self.timeout_s)

    def __call__(self, pixels: np.ndarray) -> list[Detection]:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="PNG")
        request = {"schema": SCHEMA, "id": uuid.uuid4().hex, "image": base64.b64encode(file.getvalue()).decode()}
        answer = self._ask(request)
        if not isinstance(answer, dict) or answer.get("schema") != SCHEMA or answer.get("id") != request["id"]:
            raise RewardError(
                f"the detector at {self.address} did not answer in schema {SCHEMA} under the request's id; see "
                "docs/rewards/geneval.md for what it must send"
            )
        if "error" in answer:
            raise DetectionError(f"{self.address}: {answer['error']}")
        try:
            return [_detection(item, pixels.shape[:2]) for item in answer["objects"]]
        except (KeyError, TypeError, *UNREADABLE) as error:
            raise RewardError(
                f"the detector at {self.address} sent an object that is not one of schema {SCHEMA}: "
                f"{type(error).__name__}: {error}; see docs/rewards/geneval.md"
            ) from error

    def _ask(self, request: dict[str, Any]) -> Any:
        """The answer's JSON; waits twice as long, give or take a half, after each failed try."""
        import httpx

        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.backoff_s * 2 ** (attempt - 1) * random.Random(request["id"]).uniform(0.5, 1.5))
            try:
                response = self._client.post(f"{self.address.rstrip('/')}/detect", json=request)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == httpx.codes.OK:
                try:
                    return response.json()
                except ValueError as error:
                    raise RewardError(f"the detector at {self.address} answered 200 without JSON: {error}") from error
            reason = f"status {response.status_code}"
            if response.status_code not in _RETRIED:
                raise RewardError(f"the detector at {self.address} refused the request with {reason}")
        raise Unreachable(f"the detector at {self.address} gave no answer in {self.tries} tries ({reason})")


def _detection(item: dict[str, Any], size: tuple[int, ...]) -> Detection:
    """One object of an answer for an image of `size` (height, width).

    Raises:
        ValueError, KeyError, TypeError, OSError, SyntaxError: it is none.
    """
    label, confidence = item["label"], float(item["confidence"])
    height, width = size
    corners = np.asarray(item["box"], dtype=float)
    if not isinstance(label, str) or not 0 <= confidence <= 1:
        raise ValueError(f"label {label!r} with confidence {confidence}")
    # Regressed corners may lie a little outside.
    left, top, right, bottom = corners.clip(0, (width, height, width, height)).tolist()
    if not (left < right and top < bottom):
        raise ValueError(f"box {item['box']} holds no pixel of an image of {width} x {height}")
    mask = None
    if item.get("mask") is not None:
        with opened(io.BytesIO(base64.b64decode(item["mask"], validate=True))) as image:
            if image.size != (width, height):
                raise ValueError(f"a mask of {image.size} for an image of {(width, height)}")
            mask = np.asarray(image.convert("L")) > 0
    return Detection(label, confidence, (left, top, right, bottom), mask)
