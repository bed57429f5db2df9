"""What stands in wandb's own files: its writer keeps rows in memory for some seconds, which a killed run loses."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEAD = 7
"""Bytes before the first record, and before each record: checksum, length (2 bytes), kind."""
_FULL, _LAST = 1, 4
"""Kinds of a record that is complete, and of the last part of one (the others: 2 first, 3 middle)."""


def records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file, a log of LevelDB's format; a torn end is left out."""
    data, place, parts = file.read_bytes(), _HEAD, list[bytes]()
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:  # a record does not begin in the last bytes of a block
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEAD])
        part = data[place + _HEAD : place + _HEAD + length]
        if kind == 0 or len(part) < length:
            return
        place += _HEAD + length
        parts = [part] if kind < 3 else [*parts, part]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows in a `.wandb` file; `_step` is the iteration."""
    from wandb.proto import wandb_internal_pb2

    message: Any = vars(wandb_internal_pb2)["Record"]  # protobuf makes the class when it is imported
    for data in records(file):
        record = message.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            yield row | {"_step": int(record.history.step.num)}


def steps(folder: Path, run: str) -> set[int] | None:
    """Iterations of a wandb run in all files of it below a folder; None: there is no file of it."""
    files = sorted(folder.glob(f"wandb/*run-*-{run}/run-{run}.wandb"))
    return {row["_step"] for file in files for row in rows(file)} if files else None
