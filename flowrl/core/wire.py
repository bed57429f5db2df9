"""Messages between a reward server and its clients: JSON, never pickle.

    GET  /rewards  ->  {"schema", "limits": {"items", "bytes", "pixels"}, "rewards": {NAME: {"card", ...}}}
    POST /score        {"schema", "request_id", "reward", "items": [{"id", "prompt", "metadata", "image", "sources"}]}
                   ->  {"schema", "request_id", "reward", "fingerprint", "results": [{"id", "scores", "error"}]}
    any refusal    ->  {"schema", "error": {"kind", "text"}}

An image or video is {"format", "shape", "data"} without loss, data in base64: "png" (8-bit RGB; frames of a video one
below the other; `shape` is optional for an image), "uint8" or "float32" (bytes of [3, H, W] or [F, 3, H, W],
little-endian). `sources` are the images of metadata["images"] as "png", since a server opens no path of a message.
A score is a number or null (never NaN, never 0 for a failure); null comes with an error {"kind", "text"}.
"""

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from flowrl.core.files import is_list, is_mapping

SCHEMA = 1
"""Version of the messages: raised whenever an older peer would misread a newer one."""
FORMATS = {"png": 0, "uint8": 1, "float32": 4}
"""Format of an image -> bytes per value; 0: not fixed."""
_PNG_HEAD = struct.Struct(">8sI4sIIBB")
_PNG_START = (b"\x89PNG\r\n\x1a\n", 13, b"IHDR")


class WireError(ValueError):
    """A message that cannot be read; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class WireImage:
    """An encoded image or video."""

    format: str
    shape: tuple[int, ...]
    """[3, H, W] or [F, 3, H, W]."""
    data: bytes

    @property
    def pixels(self) -> int:
        """Number of pixels of all frames."""
        return math.prod(self.shape) // 3


def write_image(image: WireImage) -> dict[str, Any]:
    """Plain data of an image for JSON."""
    data = base64.b64encode(image.data).decode("ascii")
    return {"format": image.format, "shape": list(image.shape), "data": data}


def read_image(record: Any, where: str) -> WireImage:
    """An image from plain data; its size comes from the header, and nothing is decoded.

    Raises WireError: an unknown format, broken base64, or a shape that is not that of the data.
    """
    if not is_mapping(record) or not {"format", "data"} <= set(record) <= {"format", "shape", "data"}:
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
    """The shape of an image, [3, H, W] or [F, 3, H, W]; that of a PNG must agree with its header."""
    size = _png_size(data, where) if kind == "png" else None
    if given is None and size is not None:
        return (3, *size)
    # type(n), since a bool is an int too.
    whole = is_list(given) and all(type(n) is int and n > 0 for n in given)
    if not (is_list(given) and whole and len(given) in (3, 4) and given[-3] == 3):
        raise WireError(f"{where}.shape: must be [3, H, W], or [F, 3, H, W] for a video, not {str(given)[:60]}")
    if size is not None and size != (math.prod(given[:-3]) * given[-2], given[-1]):
        raise WireError(f"{where}: the PNG is {size[0]} x {size[1]}, which is not the shape {given}")
    return tuple(given)


def _png_size(data: bytes, where: str) -> tuple[int, int]:
    """(height, width) of an 8-bit RGB PNG."""
    if len(data) < _PNG_HEAD.size:
        raise WireError(f"{where}: not a PNG: {len(data)} bytes are shorter than its header")
    *start, width, height, depth, colour = _PNG_HEAD.unpack_from(data)
    if tuple(start) != _PNG_START or not (width and height):
        raise WireError(f"{where}: not a PNG")
    if (depth, colour) != (8, 2):
        raise WireError(f"{where}: the PNG must be RGB of 8 bits without alpha; convert it")
    return height, width


def plain_card(card: Any) -> dict[str, Any]:
    """Plain data of a `Card` for JSON, with null for an infinite bound."""
    plain = dataclasses.asdict(card)
    return {key: None if value in (math.inf, -math.inf) else value for key, value in plain.items()}


def fingerprint(*parts: Any) -> str:
    """Short hash of plain data, different for rewards that would score differently."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def require_schema(message: Any, who: str) -> None:
    """Refuse a message of another schema version. Raises WireError: another version, or none."""
    version = message.get("schema") if is_mapping(message) else None
    if version != SCHEMA or type(version) is not int:
        has = "names no schema" if version is None else f"has schema {str(version)[:20]}"
        raise WireError(f"{who} {has}; this flowrl has schema {SCHEMA}: install the same flowrl on both sides")
