"""Files of prompts as numbered records: lines of text, JSONL, a JSON list, tables (CSV, TSV, parquet).

A file of another form is refused, never read as lines of text. Records are read on demand: of a parquet no row group
after the last one that is needed.
"""

import csv
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.registry import suggest
from flowrl.core.strict import read_text
from flowrl.display.console import log

Records = Iterator[tuple[str, dict[str, Any]]]
"""Pairs (place in the file, record)."""

FORMS = (
    "a .txt (one prompt a line), a .jsonl (one record a line), a .json (a list of strings or records), a .csv or .tsv "
    "(a table with a header), a .parquet, or hf:PATH for a data set"
)
TEXTS = ("prompt", "Prompt", "Prompts", "prompts", "prompt_en", "text", "caption", "Caption")
"""Columns under which lists keep the text of a prompt, the likeliest first."""
REFERENCE = "reference"
"""Key in the record of an edit of the path of a result that is known, for the report."""
SAMPLED_BY = (
    *("negative_prompt", "seed", "guidance_scale", "true_cfg_scale", "cfg_scale", "guidance", "height", "width"),
    *("num_inference_steps", "steps", "num_frames", "strength", "sampler", "scheduler"),
)
"""Keys by which other programs mean how the sample of one prompt is made."""
_ROWS = 1024


class NoText(ConfigError):
    """A table or a record without a column of texts; `columns` are those that it has."""

    def __init__(self, where: str, wanted: Sequence[str], columns: Sequence[str], more: str = "") -> None:
        self.columns = list(columns)
        close = suggest(wanted[0], self.columns)
        what = f"no {wanted[0]!r}" if len(wanted) == 1 else f"no column of texts ({', '.join(wanted)})"
        super().__init__(f"{where}: has {what}; {close}there are: {', '.join(self.columns)}{more}")


def read_records(file: Path, where: str, *texts: str) -> Records:
    """The records of a file, read by its suffix; a file without one holds lines of text.

    `where`: key and value of the option, for messages. `texts`: columns that may hold the text, the likeliest first; a
    plain string becomes a record with the first of them alone. Rows of a table have one of them, records of JSON and of
    a parquet may lack them all.

    Raises ConfigError: a suffix that is not among FORMS, or contents that do not fit it.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{where}: prompts are not read from a {file.suffix} file; give {FORMS}")
    return reader(file, where, texts)


def note_sampler_keys(where: str, names: Collection[str]) -> None:
    """Warn that records have values that other programs sample by: here all prompts are sampled alike."""
    found = [name for name in SAMPLED_BY if name in names]
    if found:
        log.warning(
            "%s: its records have %s, and no sampler reads them here: they are metadata for the rewards, and all "
            "prompts are sampled with the options of the command or the configuration",
            where,
            ", ".join(found),
        )


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
    return ConfigError(
        f"{where} needs a package that is not installed ({error.name})", Remedy(command="pip install 'flowrl[data]'")
    )


# ---- lines


def _raw(file: Path, where: str) -> Iterator[str]:
    """The lines of a file as they are read, never all of them at once; each ends with a newline, whatever it was.

    It is no splitlines, which also breaks at U+2028 and the like, and JSON strings may hold those.
    """
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if "\0" in line:
                    raise ConfigError(f"{where}, line {number}: holds a NUL, so it is not text; save it as UTF-8")
                yield line
    except (OSError, UnicodeDecodeError):
        read_text(file, where)  # it says what and where
        raise


def _lines(file: Path, where: str) -> Iterator[tuple[int, str]]:
    """(number, line) of every line that is not empty."""
    return ((number, line.strip()) for number, line in enumerate(_raw(file, where), 1) if line.strip())


def _plain(file: Path, where: str, texts: Sequence[str]) -> Records:
    return ((f"line {number}", {texts[0]: line}) for number, line in _lines(file, where))


def _jsonl(file: Path, where: str, texts: Sequence[str]) -> Records:
    for number, line in _lines(file, where):
        record = _parsed(line, f"{where}, line {number}")
        if not isinstance(record, dict):
            raise ConfigError(f"{where}, line {number}: needs an object, got {line[:80]!r}")
        yield f"line {number}", record


def _json(file: Path, where: str, texts: Sequence[str]) -> Records:
    result = _parsed("".join(_raw(file, where)), where)
    if not isinstance(result, list):
        raise ConfigError(f"{where}: a .json of prompts is a list of strings or of records, this is {_short(result)}")
    for number, item in enumerate(result, 1):
        if not isinstance(item, str | dict):
            raise ConfigError(f"{where}, item {number}: needs a string or a record, got {_short(item)}")
        yield f"item {number}", {texts[0]: item} if isinstance(item, str) else item


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


# ---- tables


def _separated(comma: str) -> Callable[[Path, str, Sequence[str]], Records]:
    tabs = comma == "\t"

    def read(file: Path, where: str, texts: Sequence[str]) -> Records:
        first = next((line.strip() for line in _raw(file, where) if line.strip()), "")
        # A table with tabs whose header has no quotes knows none: a cell may begin with one that is never closed, as in
        # PartiPrompts.tsv.
        bare = tabs and not all(cell[:1] == cell[-1:] == '"' for cell in first.split(comma))
        quoting = csv.QUOTE_NONE if bare else csv.QUOTE_MINIMAL
        rows = csv.reader(_raw(file, where), delimiter=comma, strict=True, quoting=quoting)
        header: list[str] = []
        column = ""
        try:
            for cells in rows:
                row = [_unquoted(cell) for cell in cells] if bare else cells
                place = f"{where}, line {rows.line_num}"
                if not any(cell.strip() for cell in row):
                    continue
                if not header:
                    header, column = _header(row, place, texts, "tabs" if tabs else "commas")
                    continue
                if len(row) != len(header):
                    more = "; a cell with a line break or a tab needs a .csv" if bare else ""
                    raise ConfigError(f"{place}: has {len(row)} cells, but the header has {len(header)} columns{more}")
                record = dict(zip(header, row, strict=True))
                if not record[column].strip():
                    raise ConfigError(f"{place}: {column!r} is empty; fill it, or leave the row out")
                yield f"line {rows.line_num}", record
        except csv.Error as error:
            raise ConfigError(f"{where}, line {rows.line_num}: not a readable table: {error}") from None

    return read


def _unquoted(cell: str) -> str:
    r"""A cell of a table with tabs; one that a writer of CSV quoted is told by the doubled quotes inside it.

    >>> [_unquoted(cell) for cell in ('"STOP" on a wall', '"STOP"', '"says ""stop"", twice"')]
    ['"STOP" on a wall', '"STOP"', 'says "stop", twice']
    """
    inside = cell[1:-1]
    quoted = cell[:1] == cell[-1:] == '"' and '""' in inside and '"' not in inside.replace('""', "")
    return inside.replace('""', '"') if quoted else cell


def _header(row: list[str], place: str, texts: Sequence[str], separator: str) -> tuple[list[str], str]:
    """(names of the columns, that of the text). Raises ConfigError: no column of the text, or a name twice."""
    names = [name.strip() for name in row]
    column = next((name for name in texts if name in names), None)
    if column is None:
        raise NoText(place, texts, names, f" (separated by {separator})")
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ConfigError(f"{place}: the header has the column {twice!r} twice; rename one")
    return names, column


def _parquet(file: Path, where: str, texts: Sequence[str]) -> Records:
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


_READERS: dict[str, Callable[[Path, str, Sequence[str]], Records]] = {
    "": _plain,
    ".txt": _plain,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
