"""The limits of a server, and its requests, read strictly before anything is decoded."""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from flowrl.core.wire import SCHEMA, WireError, WireImage, read_image, require_schema

_REQUEST_KEYS = {"schema", "request_id", "reward", "items"}
_ITEM_KEYS = {"id", "prompt", "metadata", "image", "sources"}
_ID_LENGTH = 128
_DEPTH = 32
"""Lists and objects inside each other in a sample's metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one server; the first three are sent to clients, which cut their requests by them."""

    items: int = 256
    """Samples of a request."""
    bytes: int = 64 << 20
    """Bytes of a request's body."""
    pixels: int = 1 << 26
    """Pixels of all images of a request together, and of a batch: a few kB of PNG may hold gigapixels."""
    sources: int = 8
    """Images in the metadata of a sample."""
    waiting: int = 4096
    """Samples of a reward that may wait; more are refused (503)."""
    waiting_bytes: int = 2 << 30
    """Bytes of a reward's images that wait or are being scored; more are refused (503)."""
    held_bytes: int = 256 << 20
    """Bodies being read, together; more are refused (503)."""
    connections: int = 256
    body_s: float = 30.0
    """Seconds in which the body must have come."""
    head_s: float = 10.0
    """Seconds in which a connection must have sent the head of a request."""
    request_s: float = 900.0
    """Seconds from the body to the answer."""
    score_s: float = 120.0
    """Seconds for a batch in the reward; a reward that takes longer is ended and started anew."""

    def as_json(self) -> dict[str, int]:
        return {"items": self.items, "bytes": self.bytes, "pixels": self.pixels}


class Refusal(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, kind: str, text: str, *, close: bool = False) -> None:
        super().__init__(text)
        self.status, self.kind, self.text = status, kind, text
        self.close = close
        """End the connection: the rest of the body is not to be read."""

    def body(self) -> bytes:
        return dumps({"schema": SCHEMA, "error": {"kind": self.kind, "text": self.text}})


@dataclass(frozen=True, slots=True)
class Item:
    """A sample to be scored."""

    id: str
    prompt: str
    metadata: dict[str, Any]
    image: WireImage
    sources: tuple[WireImage, ...] = ()

    @property
    def pixels(self) -> int:
        return self.image.pixels + sum(source.pixels for source in self.sources)


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    reward: str
    items: tuple[Item, ...]


def dumps(message: Any) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def parse_request(body: bytes, limits: Limits, rewards: Collection[str]) -> Request:
    """A request of /score. Raises Refusal: 400 no JSON of this form, 404 no such reward, 413 more than the limits."""
    try:
        message = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "json", f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(message, dict):
        raise Refusal(400, "form", f"the body must be an object with {', '.join(sorted(_REQUEST_KEYS))}")
    try:
        require_schema(message, "the client")
    except WireError as error:
        raise Refusal(400, "schema", str(error)) from None
    if set(message) != _REQUEST_KEYS:
        shown = sorted(str(key)[:40] for key in message)[:10]
        raise Refusal(400, "form", f"the body must have the keys {sorted(_REQUEST_KEYS)}, not {shown}")
    request_id, name, records = message["request_id"], message["reward"], message["items"]
    if not _is_id(request_id):
        raise Refusal(400, "form", f"request_id must be a string of 1 to {_ID_LENGTH} characters")
    if not isinstance(name, str):
        raise Refusal(400, "form", f"reward must be a name, not {str(name)[:60]}")
    if name not in rewards:
        raise Refusal(404, "reward", f"no reward {str(name)[:60]!r} is served here; there are: {', '.join(rewards)}")
    if not isinstance(records, list) or not records:
        raise Refusal(400, "form", "items must be a list of samples")
    if len(records) > limits.items:
        raise Refusal(413, "items", f"{len(records)} items, more than the {limits.items} of a request")
    return Request(request_id, name, _items(records, limits))


def _items(records: list[Any], limits: Limits) -> tuple[Item, ...]:
    items: list[Item] = []
    pixels = 0
    for number, record in enumerate(records):
        item = _item(record, f"items[{number}]", limits)
        pixels += item.pixels
        if pixels > limits.pixels:
            raise Refusal(
                413, "pixels", f"items[{number}]: with it the request has {pixels} pixels; {limits.pixels} are allowed"
            )
        items.append(item)
    if len({item.id for item in items}) < len(items):
        raise Refusal(400, "form", "two items have the same id")
    return tuple(items)


def _item(record: Any, where: str, limits: Limits) -> Item:
    if not isinstance(record, dict) or not {"id", "prompt", "image"} <= set(record) <= _ITEM_KEYS:
        raise Refusal(400, "form", f"{where}: must be an object with id, prompt, image, and metadata or sources")
    name, prompt, metadata, sources = (
        record["id"],
        record["prompt"],
        record.get("metadata", {}),
        record.get("sources", []),
    )
    if not _is_id(name) or not isinstance(prompt, str) or not isinstance(metadata, dict):
        raise Refusal(400, "form", f"{where}: id and prompt must be strings, metadata an object")
    if _deeper(metadata, _DEPTH):
        raise Refusal(400, "form", f"{where}.metadata: more than {_DEPTH} lists and objects inside each other")
    if "images" in metadata:
        raise Refusal(400, "form", f"{where}.metadata.images: paths are not read here; send the images in sources")
    if not isinstance(sources, list) or len(sources) > limits.sources:
        raise Refusal(413, "items", f"{where}.sources: must be a list of at most {limits.sources} images")
    try:
        images = [read_image(source, f"{where}.sources[{k}]") for k, source in enumerate(sources)]
        if any(image.format != "png" for image in images):
            raise WireError(f"{where}.sources: must be png")
        return Item(name, prompt, metadata, read_image(record["image"], f"{where}.image"), tuple(images))
    except WireError as error:
        raise Refusal(400, "image", str(error)) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _ID_LENGTH


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON; null says that there is none")


def _finite(text: str) -> float:
    # Python reads 1e999 as infinity, which cannot be written to a worker.
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _deeper(value: Any, levels: int) -> bool:
    """True where more than `levels` lists and objects are nested: what can just be read cannot be written."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(one, levels - 1) for one in inside)
