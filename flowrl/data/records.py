"""Records of a preference set in their files, read one by one, or in blocks where a file is made of those.

A set may be larger than memory: of a .jsonl the offset of each line is kept, of parquet shards a few row groups, and
data sets of Hugging Face are mapped into memory by their own library.
"""

import glob
import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.core.paths import split_of
from flowrl.data.prompt_files import missing_package
from flowrl.data.prompt_sources import as_stored, open_data_set

WINDOW_BYTES = 256 * 2**20
"""Size of the row groups that are shuffled together. Twice as much is kept: one order of winners, one of losers."""


class Later:
    """Placeholder in a scanned record for an image that is read with its row alone."""

    def __repr__(self) -> str:
        return "an image"


LATER = Later()


class Records:
    """Rows 0 .. N-1 of a source."""

    files: list[Path]
    """Files of the rows; empty for a data set."""
    folder: Path | None
    """Folder of relative paths; None: there are no files next to the rows."""

    def __len__(self) -> int:
        raise NotImplementedError

    def names(self) -> list[str]:
        """Columns; for lines: the keys of the first records."""
        raise NotImplementedError

    def place(self, row: int) -> str:
        """Place of a row, for messages: "line 3", "part-0.parquet, row 17"."""
        return f"row {row + 1}"

    def scan(self) -> Iterator[dict[str, Any] | None]:
        """Every row in order, with LATER for images inside it; None for a line that is not a record."""
        raise NotImplementedError

    def read(self, row: int) -> dict[str, Any] | None:
        """A whole row. Raises OSError: it can no longer be read."""
        raise NotImplementedError

    def blocks(self) -> np.ndarray | None:
        """First row and bytes of each block that is read as a whole, [K, 2] int64; None: rows are read one by one."""
        return None


def find_records(source: str, images: Sequence[str], subset: str | None, where: str) -> Records:
    """The records of a source (docs/preferences.md).

    `source`: a .jsonl, a .parquet, a glob of shards, a folder of either, or hf:PATH[:SPLIT]; `images`: columns that may
    hold images; `subset`: of a data set that has several; `where`: key and value of the option, for messages.

    Raises ConfigError: there is no such source, it cannot be read, or a package is not installed.
    """
    if source.startswith("hf:"):
        path, split = split_of(source.removeprefix("hf:"))
        rows = open_data_set(path, split, subset, where, "subset")
        if rows is None:
            raise ConfigError(f"{where}: there is no record in it")
        folder = Path(path).expanduser()
        return DataSet(rows, images, folder if folder.is_dir() else None)
    path = Path(source).expanduser()
    if path.is_dir():
        lines, shards = sorted(path.glob("*.jsonl")), sorted(path.rglob("*.parquet"))
        lines = [file for file in lines if file.name == "pairs.jsonl"] or lines
        if len(lines) == 1:
            return Lines(lines[0])
        if shards and not lines:
            return Shards(shards, images, where)
        result = ", ".join(file.name for file in lines[:5]) or "none"
        raise ConfigError(f"{where}: the folder must hold pairs.jsonl, one .jsonl, or .parquet files; .jsonl: {result}")
    if path.is_file():
        suffix = path.suffix.lower()
        if suffix not in ("", ".jsonl", ".parquet"):
            raise ConfigError(
                f"{where}: pairs are not read from a {path.suffix} file; give a .jsonl (one record a line), a "
                ".parquet, a pattern of such, a folder, or hf:PATH for a data set (docs/preferences.md)"
            )
        return Shards([path], images, where) if suffix == ".parquet" else Lines(path)
    shards = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not shards:
        raise ConfigError(f"{where}: there is no such file or folder")
    wrong = next((file.name for file in shards if file.suffix != ".parquet"), None)
    if wrong is not None:
        raise ConfigError(f"{where}: {wrong} is not a .parquet file; only those can be given by a pattern")
    return Shards(shards, images, where)


# ---- lines


class Lines(Records):
    """A .jsonl file; 16 bytes of each line are kept in memory."""

    def __init__(self, file: Path) -> None:
        self.file, self.folder, self.files = file, file.parent, [file]
        self._offsets, self._numbers = array("Q"), array("Q")
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
        first = (record for record in islice(self.scan(), 32) if record is not None)
        return list(dict.fromkeys(name for record in first for name in record))

    def place(self, row: int) -> str:
        return f"line {self._numbers[row]}"

    def scan(self) -> Iterator[dict[str, Any] | None]:
        with self.file.open("rb") as stream:
            yield from (_record(line) for line in stream if line.strip())

    def read(self, row: int) -> dict[str, Any] | None:
        with self.file.open("rb") as stream:
            stream.seek(self._offsets[row])
            return _record(stream.readline())


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # without a byte-order mark
    except (ValueError, RecursionError):  # broken JSON, not UTF-8, thousands of brackets
        return None
    return record if isinstance(record, dict) else None


# ---- parquet


@dataclass(frozen=True, slots=True)
class _Group:
    file: int
    """Number of the shard."""
    number: int
    """Among the shard's row groups."""
    first: int
    """Its first row in the set."""
    within: int
    """Its first row in the shard."""
    rows: int
    nbytes: int


class Shards(Records):
    """Parquet files with one layout, in the order of their names; a few row groups are kept in memory."""

    def __init__(self, files: Sequence[Path], images: Sequence[str], where: str) -> None:
        self.files, self.where, self.folder = list(files), where, files[0].parent
        self._groups: list[_Group] = []
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._add_groups(images)
        self._starts = [group.first for group in self._groups]

    def _open(self, file: Path) -> "ParquetFile":
        return ParquetFile(file, self.where)

    def _add_groups(self, images: Sequence[str]) -> None:
        first = 0
        for number, file in enumerate(self.files):
            opened = self._open(file)
            names, plain = opened.names(), opened.plain()
            if number == 0:
                self._names = names
                self._light = [name for name in names if name in plain]
                self._heavy = [name for name in names if name in images and name not in plain]
            lacking = [name for name in (*self._light, *self._heavy) if name not in names]
            if lacking:
                raise ConfigError(
                    f"{self.where}: {file.name} has no column {lacking[0]!r}, unlike {self.files[0].name}; the files "
                    "of a set must have one layout"
                )
            within = 0
            for group, (rows, nbytes) in enumerate(opened.groups()):
                if rows:
                    self._groups.append(_Group(number, group, first + within, within, rows, nbytes))
                within += rows
            first += within
        self._rows = first

    def __len__(self) -> int:
        return self._rows

    def names(self) -> list[str]:
        return self._names

    def place(self, row: int) -> str:
        group = self._groups[self._group_of(row)]
        return f"{self.files[group.file].name}, row {row - group.first + group.within + 1}"

    def scan(self) -> Iterator[dict[str, Any]]:
        later = dict.fromkeys(self._heavy, LATER)
        for group in self._groups:
            try:
                table = self._open(self.files[group.file]).read(group.number, self._light)
            except OSError as error:
                raise ConfigError(f"{self.where}: {self.files[group.file].name} cannot be read: {error}") from None
            for start in range(0, group.rows, 1024):
                yield from ({**record, **later} for record in table.slice(start, 1024).to_pylist())

    def read(self, row: int) -> dict[str, Any]:
        number = self._group_of(row)
        return self._table(number).slice(row - self._starts[number], 1).to_pylist()[0]

    def blocks(self) -> np.ndarray:
        return np.array([(group.first, group.nbytes) for group in self._groups], dtype=np.int64).reshape(-1, 2)

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def _table(self, number: int) -> Any:
        """A row group; the least recently used ones are dropped for it."""
        if number not in self._kept:
            group = self._groups[number]
            # Dropped first, so that the new one is not in memory with them.
            while self._kept and group.nbytes + sum(t.nbytes for t in self._kept.values()) > 2 * WINDOW_BYTES:
                self._kept.popitem(last=False)
            opened = self._open(self.files[group.file])
            self._kept[number] = opened.read(group.number, [*self._light, *self._heavy])
        self._kept.move_to_end(number)
        return self._kept[number]


class ParquetFile:
    """One shard, read by pyarrow."""

    def __init__(self, file: Path, where: str) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ModuleNotFoundError as error:
            raise missing_package(error, where) from None
        try:
            self._file = parquet.ParquetFile(file)
        except (ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where}: {file.name} is not a readable parquet file: {reason}") from None

    def names(self) -> list[str]:
        return list(self._file.schema_arrow.names)

    def plain(self) -> list[str]:
        """Columns of text and numbers."""
        from pyarrow import types

        kinds = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
        result = {f.name: f.type for f in self._file.schema_arrow}
        inner = {name: kind.value_type if types.is_dictionary(kind) else kind for name, kind in result.items()}
        return [name for name, kind in inner.items() if any(fits(kind) for fits in kinds)]

    def groups(self) -> list[tuple[int, int]]:
        """(rows, bytes in memory) of each row group."""
        metadata = self._file.metadata
        every = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in every]

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """A row group as a table in memory; raises OSError where it is broken."""
        from pyarrow import ArrowException

        try:
            return self._file.read_row_group(group, columns=list(columns), use_threads=False)
        except ArrowException as error:
            raise OSError(f"row group {group}: {str(error).splitlines()[0]}") from None


# ---- data sets


class DataSet(Records):
    """Rows of a data set of Hugging Face, mapped into memory; rows are read one by one."""

    def __init__(self, rows: Any, images: Sequence[str], folder: Path | None) -> None:
        self._rows = as_stored(rows, lambda names: [name for name in names if name in images])
        self.folder, self.files = folder, list[Path]()
        self._light = [
            name for name, kind in self._rows.features.items() if getattr(kind, "dtype", "binary") not in _STORED
        ]
        self._heavy = [name for name in self._rows.column_names if name in images and name not in self._light]
        self._rows = self._rows.select_columns([*self._light, *self._heavy])

    def __len__(self) -> int:
        return len(self._rows)

    def names(self) -> list[str]:
        return list(self._rows.column_names)

    def scan(self) -> Iterator[dict[str, Any]]:
        later = dict.fromkeys(self._heavy, LATER)
        yield from ({**record, **later} for record in self._rows.select_columns(self._light))

    def read(self, row: int) -> dict[str, Any]:
        return self._rows[row]


_STORED = ("binary", "large_binary", "PIL.Image.Image")
"""Types of an image in a data set: bytes, or the library's own."""
