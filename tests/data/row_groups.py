"""Parquet shards of the mind: row groups held in memory, with a count of what is read of them.

What lies above the file format is tested with these, so that it is tested where pyarrow is not installed; tests that
write real files stand beside them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.data.records import Shards

PICTURES = ("chosen", "rejected", "jpg_0", "jpg_1", "image")


def png(shade: int) -> bytes:
    """A small picture whose red is `shade`."""
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (shade, 10, 10)).save(file, format="PNG")
    return file.getvalue()


def voted(k: int) -> dict[str, Any]:
    """Row k of a set in the layout of Pick-a-Pic: the first picture, of shade k, beats one of shade 100 + k."""
    shade = k % 100
    return {"caption": f"caption {k}", "jpg_0": png(shade), "jpg_1": png(100 + shade), "label_0": 1.0, "model_0": "m"}


@dataclass
class Rows:
    """A table."""

    rows: list[dict[str, Any]]
    nbytes: int

    def slice(self, offset: int, length: int) -> Rows:
        return Rows(self.rows[offset : offset + length], 0)

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows


class Stored:
    """Shards of row groups of rows; `size` bytes a row.

    `reads` are the (shard, group) that were read with pictures, `columns` what was ever asked for, `broken` the groups
    that cannot be read, `most` the bytes that were in memory at once.
    """

    def __init__(self, content: Sequence[Sequence[list[dict[str, Any]]]], size: int = 10) -> None:
        self.content, self.size = content, size
        self.reads: list[tuple[int, int]] = []
        self.columns: set[str] = set()
        self.broken: set[tuple[int, int]] = set()
        self.most = 0
        files = [Path(f"part-{k}.parquet") for k in range(len(content))]

        whole = self

        class Held(Shards):
            def _open(self, file: Path) -> Any:
                return _File(whole, int(file.stem.split("-")[1]))

        self.records = Held(files, PICTURES, "t")


class _File:
    def __init__(self, stored: Stored, number: int) -> None:
        self.stored, self.number, self.rows = stored, number, stored.content[number]

    def names(self) -> list[str]:
        return list(next(group for group in self.rows if group)[0])

    def plain(self) -> list[str]:
        first = next(group for group in self.rows if group)[0]
        return [name for name in first if name not in PICTURES]

    def groups(self) -> list[tuple[int, int]]:
        return [(len(group), len(group) * self.stored.size) for group in self.rows]

    def read(self, group: int, columns: Sequence[str]) -> Rows:
        if (self.number, group) in self.stored.broken:
            raise OSError(f"row group {group} is damaged")
        self.stored.columns |= set(columns)
        if set(columns) & set(PICTURES):
            self.stored.reads.append((self.number, group))
            before = sum(table.nbytes for table in self.stored.records._kept.values())
            self.stored.most = max(self.stored.most, before + len(self.rows[group]) * self.stored.size)
        kept = [{name: row[name] for name in columns} for row in self.rows[group]]
        return Rows(kept, len(kept) * self.stored.size)


def shards(groups: Sequence[Sequence[int]], size: int = 10) -> Stored:
    """Shards with row groups of so many rows `voted(0), voted(1), ...`."""
    rows = iter(range(10**9))
    return Stored([[[voted(next(rows)) for _ in range(count)] for count in shard] for shard in groups], size)
