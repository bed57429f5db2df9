"""Records of a preference set where they lie: read one by one, in blocks that are cheap to read together.

A set may be larger than memory. Of a .jsonl only the place of each line is kept, of parquet shards a few row groups.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.strict import ConfigError


class Later:
    """Stands in a scanned record for a picture that is read with its row only."""

    def __repr__(self) -> str:
        return "a picture"


LATER = Later()


class Records(Protocol):
    """Rows 0 .. N-1 of a source."""

    folder: Path | None
    """What relative paths start from; None: there are no files beside the rows."""

    def __len__(self) -> int: ...

    def names(self) -> list[str]:
        """Columns; of lines: the keys of the first one that is a record."""
        ...

    def place(self, row: int) -> str:
        """Where a row stands, for messages: "line 3", "part-0.parquet, row 17"."""
        ...

    def scan(self) -> Iterator[dict[str, Any] | None]:
        """Every row in order, pictures inside them as LATER; None for a line that is no record."""
        ...

    def read(self, row: int) -> dict[str, Any] | None:
        """A whole row."""
        ...

    def blocks(self) -> np.ndarray | None:
        """First row and bytes of each part that is read in one piece, [K, 2] int64; None: every row by itself."""
        ...


class Lines:
    """A .jsonl file: 12 bytes a line are kept in memory."""

    def __init__(self, file: Path) -> None:
        self.file, self.folder = file, file.parent
        self._offsets, self._numbers = array("Q"), array("L")
        offset = 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def names(self) -> list[str]:
        return list(next((record for record in self.scan() if record is not None), {}))

    def place(self, row: int) -> str:
        return f"line {self._numbers[row]}"

    def scan(self) -> Iterator[dict[str, Any] | None]:
        with self.file.open("rb") as stream:
            yield from (_record(line) for line in stream if line.strip())

    def read(self, row: int) -> dict[str, Any] | None:
        with self.file.open("rb") as stream:
            stream.seek(self._offsets[row])
            return _record(stream.readline())

    def blocks(self) -> None:
        return None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # a byte-order mark is no part of the first record
    except ValueError:  # broken JSON or no UTF-8
        return None
    return record if isinstance(record, dict) else None


def find_lines(source: str, where: str) -> Lines:
    """The .jsonl that `source` names: the file, or the one that a folder holds.

    Raises:
        ConfigError: there is none, or several and none of them is pairs.jsonl.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        named = [file for file in found if file.name == "pairs.jsonl"] or found
        if len(named) != 1:
            names = ", ".join(file.name for file in found[:5]) or "none"
            raise ConfigError(f"{where}: the folder must hold pairs.jsonl, or one .jsonl; it holds: {names}")
        path = named[0]
    if not path.is_file():
        raise ConfigError(f"{where}: there is no such file or folder")
    return Lines(path)
