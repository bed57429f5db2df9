"""Files that suites read: what they declare, prompts of a benchmark, and results of its official evaluator."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.core.assets import table
from flowrl.core.errors import ConfigError, Remedy
from flowrl.data.prompt_files import TEXTS, NoText, note_sampler_keys, read_records
from flowrl.evaluation.suite import Facts, Level, Row
from flowrl.media.media import UNREADABLE, opened

Scores = dict[str, "float | None"]


def facts_of(name: str, level: Level) -> Facts:
    """The declaration of a suite of flowrl's, from facts.yaml."""
    facts = table(Path(__file__).with_name("facts.yaml"))[name]
    return Facts(**facts | {"reward": facts["reward"] and tuple(facts["reward"])}, level=level)


def tables_of(name: str) -> Any:
    """The tables of a benchmark, from tables.yaml."""
    return table(Path(__file__).with_name("tables.yaml"))[name]


def records_of(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of each line of a .jsonl, item of a .json, or row of a .csv, .tsv or .parquet.

    Raises ConfigError: no such file, not of these forms, or a record that lacks one of `keys`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; give a .jsonl, .json, .csv, .tsv or .parquet")
    for place, record in read_records(path, str(path), keys[0] if keys else "prompt"):
        lacking = [key for key in keys if key not in record]
        if lacking:
            raise ConfigError(f"{path}, {place}: has no {lacking[0]!r}; there are: {', '.join(map(str, record))}")
        yield f"{path}, {place}", record


def last_of(path: str) -> str:
    r"""The name of a file by its path on any system; results may come from another one.

    >>> last_of("C:\\made\\a cat-0.mp4"), last_of("made/a cat-0.mp4")
    ('a cat-0.mp4', 'a cat-0.mp4')
    """
    return path.replace("\\", "/").rpartition("/")[2]


def keep_once(result: dict[tuple[str, int], Scores], key: tuple[str, int], scores: Scores, where: str) -> None:
    """Add the scores of a sample. Raises ConfigError: it has some already."""
    if key in result:
        raise ConfigError(
            f"{where}: prompt {key[0]!r}, sample {key[1]} has a result already; keep one of the two lines"
        )
    result[key] = scores


# ---- prompts

FORMS = "a .txt (one prompt a line), .jsonl, .json, .csv, .tsv or .parquet whose column of texts is prompt or Prompts"


def prompts_of(path: Path, where: str) -> list[tuple[str, dict[str, Any]]]:
    """(text, record) of each prompt of a file, in its order; equal texts are taken once.

    Raises ConfigError: a form that is not read, no column of texts, or an empty list.
    """
    first: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for place, record in read_records(path, where, *TEXTS):
        column = next((name for name in TEXTS if name in record), None)
        if column is None:
            raise NoText(f"{where}, {place}", TEXTS, list(record))
        names.update(record)
        first.setdefault(text_of(record[column], f"{where}, {place}").strip(), record)
    if not first:
        raise ConfigError(f"{where}: there is no prompt in it")
    note_sampler_keys(where, names)
    return list(first.items())


def text_of(value: Any, where: str) -> str:
    """The text of a prompt. Raises ConfigError: it is none, or an empty one."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: the prompt {value!r} must be a text that is not empty; mend it, or leave it out")
    return value


def column_of(record: dict[str, Any], name: str) -> str:
    """The value of a column whose name is written in any case; "" without it."""
    return next((str(value).strip() for key, value in record.items() if str(key).casefold() == name.casefold()), "")


def id_of(text: str) -> str:
    """Identity of a prompt that has no number of its own: 12 digits of a hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- edits


def source_of(name: Any, folder: Path, where: str) -> str:
    """Absolute path of the image that a record is about, given relative to `folder`.

    Raises ConfigError: it is missing, or no image.
    """
    file = (folder / str(name)).resolve()
    if not file.is_file():
        raise ConfigError(f"{where}: there is no image {name!r} ({file}); put the benchmark's images beside its list")
    try:
        with opened(file):
            return str(file)
    except UNREADABLE as error:
        raise ConfigError(f"{where}: {name!r} cannot be read as an image: {error}") from None


def one_image(k: int, name: str) -> None:
    """Raise ConfigError for a second image of a prompt: the evaluator reads one."""
    if k:
        raise ConfigError(
            f"--export: the evaluator of {name} reads one image of each prompt", Remedy(flag="--samples 1")
        )


def apart(rows: Sequence[Row]) -> list[Row]:
    """Rows each of a prompt of its own: equal instructions for different images are different edits."""
    return [replace(row, prompt=row.id) for row in rows]
