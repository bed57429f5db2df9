"""What a reward server and its clients say to each other: JSON, never pickle. A helper, not a reward.

    GET  /rewards  ->  {"schema", "limits": {"items", "bytes", "pixels"}, "rewards": {NAME: {"card", ...}}}
    POST /score        {"schema", "request_id", "reward", "items": [{"id", "prompt", "metadata", "picture", "sources"}]}
                   ->  {"schema", "request_id", "reward", "fingerprint", "results": [{"id", "scores", "error"}]}
    any refusal    ->  {"schema", "error": {"kind", "text"}}

A picture is {"format", "shape", "data"}, without loss: "png" (8-bit RGB; the frames of a clip stand one below the
other; `shape` may be left out for a single picture), "uint8" or "float32" (the bytes of [3, H, W] or [F, 3, H, W],
little-endian), each in base64. `sources` are the pictures of metadata["images"], as "png": a server opens no path that
it was sent.
A score is a number or null (never NaN, never 0 for a failure); null comes with an error {"kind", "text"}.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
"""Of the messages: raised whenever an older peer would misread a newer one."""
FORMATS = {"png": 0, "uint8": 1, "float32": 4}
"""Format of a picture -> bytes of a value; a PNG says itself how long it is."""
_PNG_HEAD = struct.Struct(">8sI4sIIBB")
_PNG_START = (b"\x89PNG\r\n\x1a\n", 13, b"IHDR")


class WireError(ValueError):
    """A message that cannot be understood; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class WireImage:
    """A picture or clip on its way, still encoded."""

    format: str
    shape: tuple[int, ...]
    """[3, H, W] or [F, 3, H, W]."""
    data: bytes

    @property
    def pixels(self) -> int:
        """Of all frames."""
        return math.prod(self.shape) // 3


def write_image(image: WireImage) -> dict[str, Any]:
    """As plain data for JSON."""
    data = base64.b64encode(image.data).decode("ascii")
    return {"format": image.format, "shape": list(image.shape), "data": data}


def read_image(record: Any, where: str) -> WireImage:
    """A picture from plain data, its size known from its header alone: nothing is decoded.

    Raises:
        WireError: no such format, no base64, or a shape that is not that of the data.
    """
    if not isinstance(record, dict) or not {"format", "data"} <= set(record) <= {"format", "shape", "data"}:
        raise WireError(f"{where}: must be an object with format, data and shape")
    kind, text = record["format"], record["data"]
    if not isinstance(kind, str) or kind not in FORMATS or not isinstance(text, str):
        raise WireError(f"{where}: format must be one of {', '.join(FORMATS)}, data a string of base64")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{where}.data: not base64: {error}") from None
    shape = _shape(record.get("shape"), kind, data, where)
    if kind != "png" and len(data) != math.prod(shape) * FORMATS[kind]:
        raise WireError(f"{where}: {len(data)} bytes are not {list(shape)} values of {kind}")
    return WireImage(kind, shape, data)


def _shape(given: Any, kind: str, data: bytes, where: str) -> tuple[int, ...]:
    """[3, H, W] or [F, 3, H, W], which a PNG's own header must confirm."""
    size = _png_size(data, where) if kind == "png" else None
    if given is None and size is not None:
        return (3, *size)
    # bool is an int.
    whole = isinstance(given, list) and all(type(n) is int and n > 0 for n in given)
    if not whole or len(given) not in (3, 4) or given[-3] != 3:
        raise WireError(f"{where}.shape: must be [3, H, W], or [F, 3, H, W] for a clip, not {str(given)[:60]}")
    if size is not None and size != (math.prod(given[:-3]) * given[-2], given[-1]):
        raise WireError(f"{where}: the PNG is {size[0]} x {size[1]}, which is not the shape {given}")
    return tuple(given)


def _png_size(data: bytes, where: str) -> tuple[int, int]:
    """(height, width) of an 8-bit RGB PNG."""
    if len(data) < _PNG_HEAD.size:
        raise WireError(f"{where}: no PNG: {len(data)} bytes are shorter than its header")
    *start, width, height, depth, colour = _PNG_HEAD.unpack_from(data)
    if tuple(start) != _PNG_START or not (width and height):
        raise WireError(f"{where}: no PNG")
    if (depth, colour) != (8, 2):
        raise WireError(f"{where}: the PNG must be RGB of 8 bits without alpha; convert it")
    return height, width


def plain_card(card: Any) -> dict[str, Any]:
    """A `Card` for JSON: null where there is no bound."""
    plain = dataclasses.asdict(card)
    return {key: None if value in (math.inf, -math.inf) else value for key, value in plain.items()}


def fingerprint(*parts: Any) -> str:
    """Short hash of plain data: tells apart rewards that would score differently."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def require_schema(message: Any, who: str) -> None:
    """Refuse what speaks another version of the schema.

    Raises:
        WireError: so it is, or the message names none.
    """
    spoken = message.get("schema") if isinstance(message, Mapping) else None
    if spoken != SCHEMA or type(spoken) is not int:
        said = "names no schema" if spoken is None else f"speaks schema {str(spoken)[:20]}"
        raise WireError(f"{who} {said}; this flowrl speaks schema {SCHEMA}: install the same flowrl on both sides")
