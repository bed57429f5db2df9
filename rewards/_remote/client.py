"""The client of reward servers, which the reward `remote` is. A helper, not a reward."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shlex
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flowrl.rewards._remote.options import Config
from flowrl.rewards._remote.servers import Server, Servers
from torch import Tensor

from flowrl.core.errors import Remedy
from flowrl.core.wire import SCHEMA, WireError, WireImage, require_schema, write_image
from flowrl.media.media import open_image
from flowrl.media.transport import pack, png
from flowrl.reward import Card, Images, RewardError, unscored

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("flowrl")
_OVERHEAD_BYTES = 1024
"""Bytes of an item without its image, prompt and metadata."""
_AGAIN = (408, 429)
"""Statuses below 500 after which another try may do better."""
_LONGEST_REST_S = 60.0
"""That a server can ask for."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A sample with all that belongs to it, as it will be sent."""

    row: int
    sample: Tensor
    prompt: str
    metadata: dict[str, Any]
    sources: tuple[WireImage, ...]
    size: int
    """Bytes in a body, at most."""

    @property
    def pixels(self) -> int:
        return self.sample.numel() // 3 + sum(source.pixels for source in self.sources)


@dataclass(slots=True)
class _Call:
    """One call of `score`: how long it may take, and what went wrong in it, which is reported once at its end."""

    deadline: float
    lost: int = 0
    last: str = ""
    given_up: bool = False


class Client:
    """One reward on several servers.

    Raises:
        RewardError: no server answers, none has the reward, or they disagree on what it computes.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.http = _http_client(config)
        self.servers = Servers(config.servers)
        self.limits: dict[str, int] = {}
        self.fingerprint = ""
        self.card = self._introduce()

    def score(self, images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict:
        """{output: [B]}; NaN where the servers could give no score.

        Raises:
            RewardError: a sample that the reward refuses, or a server that must not be asked again.
        """
        table = {name: torch.full((len(prompts),), math.nan) for name in self.card.outputs}
        parts = [self._part(row, *one) for row, one in enumerate(zip(images, prompts, metadata, strict=True))]
        call = _Call(time.monotonic() + self.config.deadline_s)
        chunks = list(self._chunks(parts))
        with ThreadPoolExecutor(min(self.config.concurrency, len(chunks)) or 1) as pool:
            futures = [pool.submit(self._send, chunk, call) for chunk in chunks]
            try:
                replies = [future.result() for future in futures]
            finally:
                call.given_up = True
                for future in futures:
                    future.cancel()
        for chunk, reply in zip(chunks, replies, strict=True):
            for part in chunk:
                for name, value in reply.get(str(part.row), {}).items():
                    table[name][part.row] = math.nan if value is None else value
        if call.lost:
            name = self.config.reward
            unscored(f"no score for {call.lost} of {len(prompts)} from the servers of {name!r}: {call.last}")
        return table

    # ---- requests

    def _part(self, row: int, sample: Tensor, prompt: str, metadata: dict) -> _Part:
        paths = metadata.get("images", ())
        rest = {key: value for key, value in metadata.items() if key != "images"}
        try:
            text = json.dumps(rest, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward 'remote': the metadata of {prompt!r} is no JSON: {error}") from None
        sources = tuple(_source(path) for path in paths)
        # What is not finite travels as float32 whatever is asked for (`pack`).
        exact = self.config.encoding == "float32" or not bool(sample.isfinite().all())
        values = sample.numel() * (4 if exact else 1)
        # A PNG of noise is a little larger than its pixels; base64 takes 4 bytes for 3.
        raw = 1.01 * values + sum(len(source.data) for source in sources)
        size = math.ceil(raw * 4 / 3) + len(text) + len(json.dumps(prompt)) + _OVERHEAD_BYTES * (1 + len(sources))
        return _Part(row, sample, prompt, rest, sources, size)

    def _chunks(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Requests within all limits, of whole samples in order; a single one if groups must stay together."""
        config, limits = self.config, self.limits
        # A call that fits into one request is shared out all the same: no server is to wait for another.
        share = math.ceil(len(parts) / len(self.servers.servers))
        most = min(config.max_items, limits["items"], share)
        room, pixels = min(config.max_megabytes * 1e6, limits["bytes"]) - _OVERHEAD_BYTES, limits["pixels"]
        if self.card.needs_groups:
            self._require_room(parts)
            most, room = len(parts), math.inf
        chunk: list[_Part] = []
        size = seen = 0
        for part in parts:
            if chunk and (len(chunk) >= most or size + part.size > room or seen + part.pixels > pixels):
                yield chunk
                chunk, size, seen = [], 0, 0
            chunk.append(part)
            size, seen = size + part.size, seen + part.pixels
        if chunk:
            yield chunk

    def _require_room(self, parts: list[_Part]) -> None:
        count, size, pixels = len(parts), sum(p.size for p in parts), sum(p.pixels for p in parts)
        limits = self.limits
        if count > limits["items"] or size > limits["bytes"] or pixels > limits["pixels"]:
            raise RewardError(
                f"reward {self.config.reward!r} wants its {count} samples in one request: about {size} bytes and "
                f"{pixels} pixels, more than its servers take ({limits}); start them with a larger --max-items, "
                "--max-body-mb or --max-pixels"
            )

    def _send(self, chunk: list[_Part], call: _Call) -> dict[str, dict[str, float | None]]:
        """Id -> scores, {} after the deadline; one request id for all tries, so that no server scores it twice."""
        request_id = uuid.uuid4().hex
        items = [
            {
                "id": str(part.row),
                "prompt": part.prompt,
                "metadata": part.metadata,
                "image": write_image(pack(part.sample, self.config.encoding)),
                "sources": [write_image(source) for source in part.sources],
            }
            for part in chunk
        ]
        message = {"schema": SCHEMA, "request_id": request_id, "reward": self.config.reward, "items": items}
        body = json.dumps(message, allow_nan=False).encode()
        while not call.given_up and (server := self.servers.take(call.deadline)) is not None:
            try:
                reply = self._try(server, body, call.deadline)
                rows = self._rows(reply, request_id, chunk)
            except _Again as error:
                self.servers.failed(server, error.rest_s)
                call.last = f"{server.url}: {error}"
                log.info("reward %r: %s", self.config.reward, call.last)
            except BaseException:
                self.servers.gave_up(server)
                raise
            else:
                self.servers.succeeded(server)
                return self._judged(rows, call)
        call.lost += len(chunk)
        call.last = f"no answer within deadline_s={self.config.deadline_s:g}; {call.last or 'all servers rest'}"
        return {}

    def _try(self, server: Server, body: bytes, deadline: float) -> Any:
        import httpx

        left = max(deadline - time.monotonic(), 0.001)
        try:
            answer = self.http.post(
                f"{server.url}/score",
                content=body,
                headers={"content-type": "application/json"},
                timeout=min(self.config.timeout_s, left),
            )
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if answer.status_code == 200:
            return _json(answer)
        text = f"status {answer.status_code}: {_error(answer)}"
        if answer.status_code in _AGAIN or answer.status_code >= 500:
            raise _Again(text, _seconds(answer.headers.get("retry-after")))
        raise RewardError(f"reward {self.config.reward!r} on {server.url}: {text}")

    def _rows(self, reply: Any, request_id: str, chunk: list[_Part]) -> list[dict[str, Any]]:
        """The results of a reply that answers this very request, all of it."""
        if not isinstance(reply, dict) or "schema" not in reply:
            raise _Again("an answer that is not of a reward server")
        try:
            require_schema(reply, "the server")
        except WireError as error:
            raise RewardError(f"reward {self.config.reward!r}: {error}") from None
        try:
            fingerprint, rows = reply["fingerprint"], reply["results"]
            ids, asked = [row["id"] for row in rows], [str(part.row) for part in chunk]
            mine = reply["request_id"] == request_id and sorted(ids) == sorted(asked)
            whole = mine and all(set(row["scores"]) == set(self.card.outputs) for row in rows)
            numbers = whole and all(_is_score(v) for row in rows for v in row["scores"].values())
        except (KeyError, TypeError) as error:
            raise _Again(f"an answer of another form ({type(error).__name__}: {error})") from None
        if not numbers:
            raise _Again("an answer to another question, or without all its scores")
        self._require_same(fingerprint)
        return rows

    def _judged(self, rows: list[dict[str, Any]], call: _Call) -> dict[str, dict[str, float | None]]:
        for row in rows:
            error = row.get("error")
            if error is not None and error.get("kind") == "refused":
                raise RewardError(f"reward {self.config.reward!r}: {error.get('text')}")
            if error is not None:
                call.lost += 1
                call.last = f"{error.get('kind')}: {error.get('text')}"
        return {row["id"]: row["scores"] for row in rows}

    # ---- what the servers say of themselves

    def _introduce(self) -> Card:
        """The card of the reward, which all servers that answer must agree on; waits for a first one."""
        deadline, said = time.monotonic() + self.config.start_s, {}
        while True:
            result = {}
            for server in self.servers.servers:
                try:
                    result[server.url] = self._ask(server.url)
                except _Again as error:
                    said[server.url] = str(error)
            if result:
                break
            if time.monotonic() >= deadline:
                reasons = "; ".join(f"{url}: {text}" for url, text in said.items())
                raise RewardError(
                    f"reward 'remote': no server answers ({reasons}); start one with "
                    f"flowrl serve --reward {shlex.quote(self.config.reward)}"
                )
            time.sleep(0.5)
        for url in set(said) - set(result):
            log.warning(
                "reward %r: %s does not answer (%s); the run starts without it", self.config.reward, url, said[url]
            )
        for message in result.values():
            self._require_same(message["rewards"][self.config.reward]["fingerprint"])
        # What every server takes.
        self.limits = {n: min(int(m["limits"][n]) for m in result.values()) for n in ("items", "bytes", "pixels")}
        card = _card(next(iter(result.values()))["rewards"][self.config.reward]["card"], self.config)
        # A cache of scores that outlives the servers must not outlive what they compute.
        return dataclasses.replace(card, version=f"{card.version} at {self.fingerprint}")

    def _ask(self, url: str) -> Any:
        import httpx

        try:
            answer = self.http.get(f"{url}/rewards", timeout=min(10.0, self.config.timeout_s))
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if answer.status_code in _AGAIN or answer.status_code >= 500:
            raise _Again(f"status {answer.status_code}")
        if answer.status_code != 200:
            raise RewardError(f"reward 'remote': {url}: status {answer.status_code}: {_error(answer)}")
        message = _json(answer)
        try:
            require_schema(message, f"the server {url}")
        except WireError as error:
            raise RewardError(f"reward 'remote': {error}") from None
        if self.config.reward not in message["rewards"]:
            there = ", ".join(message["rewards"])
            raise RewardError(f"reward 'remote': {url} has no reward {self.config.reward!r}; it serves: {there}")
        return message

    def _require_same(self, fingerprint: str) -> None:
        self.fingerprint = self.fingerprint or fingerprint
        if fingerprint != self.fingerprint:
            raise RewardError(
                f"reward {self.config.reward!r}: two servers, or one before and after a restart, compute different "
                f"things ({self.fingerprint} and {fingerprint}); start all with the same flowrl, file and options"
            )


class _Again(Exception):
    """This try came to nothing; another may not."""

    def __init__(self, text: str, rest_s: float = 0.0) -> None:
        super().__init__(text)
        self.rest_s = rest_s


def _http_client(config: Config) -> httpx.Client:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise RewardError(
            f"reward 'remote' needs a package that is not installed ({error.name})",
            Remedy(command="pip install 'flowrl[serve]'"),
        ) from error
    token = None
    if config.token_file is not None:
        try:
            token = Path(config.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RewardError(f"reward 'remote': token_file={config.token_file!r}: {error.strerror or error}") from None
    elif config.token_env is not None:
        token = os.environ.get(config.token_env, "").strip()
    if token == "":
        raise RewardError(f"reward 'remote': there is no token in {config.token_file or config.token_env}")
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency, keepalive_expiry=30.0)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    # Reward servers stand beside the trainer: a proxy of the environment is none of theirs.
    return httpx.Client(headers=headers, limits=pool, trust_env=False)


def _source(path: str) -> WireImage:
    """A reference image of the prompt, as the server will find it."""
    try:
        image = open_image(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(f"reward 'remote': the image {path!r} of a prompt cannot be read: {error}") from None
    return WireImage("png", (3, image.height, image.width), png(image))


def _card(plain: dict[str, Any], config: Config) -> Card:
    """The server's card, as it is from afar: no gradients, no memory here, and scoring leaves this process idle."""
    known = {item.name for item in dataclasses.fields(Card)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in plain.items() if key in known
    }
    low, high = values.pop("low", None), values.pop("high", None)
    try:
        card = Card(low=-math.inf if low is None else low, high=math.inf if high is None else high, **values)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward 'remote': the card of {config.reward!r} is not one of this flowrl: {error}"
        ) from None
    return dataclasses.replace(card, differentiable=False, memory_gib=0.0, overlap=True, overlap_on_gpu=False)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise _Again(f"an answer that is no JSON: {error}") from None


def _error(answer: httpx.Response) -> str:
    """The server's own words, where it has any."""
    try:
        return str(answer.json()["error"]["text"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After header; 0 where it is not a number."""
    try:
        return min(max(float(text or 0), 0.0), _LONGEST_REST_S)
    except ValueError:
        return 0.0


def _is_score(value: Any) -> bool:
    # bool is an int.
    return value is None or (type(value) in (int, float) and math.isfinite(value))
