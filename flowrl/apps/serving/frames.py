"""The messages between a server and its workers over a socket.

A frame is the length of a JSON header and of what follows it, the header, and the images' bytes one after the other.
"""

import json
import struct
from io import BufferedIOBase
from typing import Any

from flowrl.apps.serving.messages import Item, dumps
from flowrl.core.wire import WireImage

LENGTHS = struct.Struct(">IQ")
"""Bytes of the header, and of the images."""
Result = dict[str, Any]
"""{"scores": {output: number or None}, "error": {"kind", "text"} or None}."""


def pack_frame(header: Any, images: tuple[bytes, ...] = ()) -> list[bytes]:
    """The parts of a frame, to be written one after the other."""
    head = dumps(header)
    return [LENGTHS.pack(len(head), sum(map(len, images))), head, *images]


def pack_items(items: list[Item]) -> list[bytes]:
    """A batch as a frame."""

    def plain(item: Item) -> dict[str, Any]:
        images = [(p.format, p.shape, len(p.data)) for p in (item.image, *item.sources)]
        return {"id": item.id, "prompt": item.prompt, "metadata": item.metadata, "images": images}

    data = tuple(image.data for item in items for image in (item.image, *item.sources))
    return pack_frame([plain(item) for item in items], data)


def unpack_items(records: list[dict[str, Any]], data: bytes) -> list[Item]:
    """The batch of a frame's header and images."""
    items, place = [], 0
    for record in records:
        images = []
        for kind, shape, size in record["images"]:
            images.append(WireImage(kind, tuple(shape), data[place : place + size]))
            place += size
        items.append(Item(record["id"], record["prompt"], record["metadata"], images[0], tuple(images[1:])))
    return items


def failed(outputs: tuple[str, ...], kind: str, text: str) -> Result:
    """No scores, and why."""
    return {"scores": dict.fromkeys(outputs), "error": {"kind": kind, "text": text[:2000]}}


def read_frame(file: BufferedIOBase) -> tuple[Any, bytes] | None:
    """(header, images) of the next frame; None at the end."""
    lengths = file.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, rest = LENGTHS.unpack(lengths)
    return json.loads(file.read(head)), file.read(rest)
