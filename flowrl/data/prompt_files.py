"""Files of prompts as numbered records: lines of text, JSONL, a JSON list, tables (CSV, TSV, parquet).

A file of another form is refused, never read as lines of text. Records are read on demand: of a parquet no row group
after the last one that is needed.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.strict import read_text

Records = Iterator[tuple[str, dict[str, Any]]]
"""Pairs (place in the file, record)."""

FORMS = (
    "a .txt (one prompt a line), a .jsonl (one record a line), a .json (a list of strings or records), a .csv or .tsv "
    "(a table with a header), a .parquet, or hf:PATH for a data set"
)
_ROWS = 1024


def read_records(file: Path, where: str, prompt: str) -> Records:
    """The records of a file, read by its suffix; a file without one holds lines of text.

    Args:
        file: an existing file.
        where: key and value of the option, for messages.
        prompt: column of the text; a plain string becomes a record with this column alone.

    Raises:
        ConfigError: a suffix that is not among FORMS, or contents that do not fit it.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{where}: prompts are not read from a {file.suffix} file; give {FORMS}")
    return reader(file, where, prompt)


def named_as_file(word: str) -> bool:
    """Whether a word of the command line is the name of a file of prompts, not a prompt.

    >>> [named_as_file(word) for word in ("a.txt", "old/set.xlsx", "a cat, 2.5 years old", "cat", "no. 5")]
    [True, True, False, False, False]
    """
    if Path(word).suffix.lower() in _READERS and Path(word).suffix:
        return True
    # A name with another suffix is a file too, which is refused, and not a prompt.
    return re.fullmatch(r"\S*\w\.[A-Za-z][A-Za-z0-9]{1,7}", word) is not None


def missing_package(error: ModuleNotFoundError, where: str) -> ConfigError:
    return ConfigError(f'{where} needs a package that is not installed ({error.name}): run pip install "flowrl[data]"')


# ---- lines


def _lines(file: Path, where: str) -> Iterator[tuple[int, str]]:
    """(number, line) of every line that is not empty."""
    # Not splitlines, which also breaks at U+2028 and the like, and JSON strings may hold those.
    for number, line in enumerate(_text(file, where).split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def _text(file: Path, where: str) -> str:
    text = read_text(file, where)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(f"{where}, line {line}: holds a NUL, so it is not text; save it as UTF-8")
    return text


def _plain(file: Path, where: str, prompt: str) -> Records:
    return ((f"line {number}", {prompt: line}) for number, line in _lines(file, where))


def _jsonl(file: Path, where: str, prompt: str) -> Records:
    for number, line in _lines(file, where):
        record = _parsed(line, f"{where}, line {number}")
        if not isinstance(record, dict):
            raise ConfigError(f"{where}, line {number}: needs an object, got {line[:80]!r}")
        yield f"line {number}", record


def _json(file: Path, where: str, prompt: str) -> Records:
    result = _parsed(_text(file, where), where)
    if not isinstance(result, list):
        raise ConfigError(f"{where}: a .json of prompts is a list of strings or of records, this is {_short(result)}")
    for number, item in enumerate(result, 1):
        if not isinstance(item, str | dict):
            raise ConfigError(f"{where}, item {number}: needs a string or a record, got {_short(item)}")
        yield f"item {number}", {prompt: item} if isinstance(item, str) else item


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


# ---- tables


def _separated(comma: str) -> Callable[[Path, str, str], Records]:
    def read(file: Path, where: str, prompt: str) -> Records:
        rows = csv.reader(io.StringIO(_text(file, where), newline=""), delimiter=comma, strict=True)
        header: list[str] = []
        try:
            for row in rows:
                place = f"{where}, line {rows.line_num}"
                if not any(cell.strip() for cell in row):
                    continue
                if not header:
                    header = _header(row, place, prompt, comma)
                    continue
                if len(row) != len(header):
                    raise ConfigError(f"{place}: has {len(row)} cells, but the header has {len(header)} columns")
                record = dict(zip(header, row, strict=True))
                if not record[prompt].strip():
                    raise ConfigError(f"{place}: {prompt!r} (data.prompt_column) is empty")
                yield f"line {rows.line_num}", record
        except csv.Error as error:
            raise ConfigError(f"{where}, line {rows.line_num}: not a readable table: {error}") from None

    return read


def _header(row: list[str], place: str, prompt: str, comma: str) -> list[str]:
    """Names of the columns.

    Raises:
        ConfigError: no column of the prompt, or a name twice.
    """
    names = [name.strip() for name in row]
    if prompt not in names:
        what = "commas" if comma == "," else "tabs"
        raise ConfigError(
            f"{place}: the header has no column {prompt!r} (data.prompt_column); there are: {', '.join(names)} "
            f"(separated by {what})"
        )
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ConfigError(f"{place}: the header has the column {twice!r} twice; rename one")
    return names


def _parquet(file: Path, where: str, prompt: str) -> Records:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise missing_package(error, where) from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(_ROWS, row_groups=[group], use_threads=False):
                    for record in batch.to_pylist():
                        number += 1
                        yield f"row {number}", record
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        after = f" after row {number}" if number else ""
        raise ConfigError(f"{where}: not a readable parquet file{after}: {reason}") from None


_READERS: dict[str, Callable[[Path, str, str], Records]] = {
    "": _plain,
    ".txt": _plain,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
