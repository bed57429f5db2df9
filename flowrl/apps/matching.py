"""The records of a list matched with the files of a folder: by what a record says, by place only if it says nothing.

A value names a file if it is the file's name, stem or path, or the number in it, or if it is a prompt and the file is
called by it or its beginning. A key that does so for every file matches them. A list goes by place only where no value
names a file and the names have one order.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from flowrl.core.errors import ConfigError
from flowrl.core.files import is_list, is_mapping
from flowrl.data.natural import natural, one_order

Record = tuple[str, dict[str, Any]]
"""(prompt, metadata)."""
NAMING = ("image", "video", "file", "file_name")
"""Keys under which a record is said to name its file; they go before all others."""
_SAYING = (*NAMING, "image_path", "image_name", "img", "video_path", "video_name", "file_path", "filename", "path")
"""Keys whose texts name a file, even if it is none of these."""
_PROMPT = "prompt"
_REFERENCES = "images"
"""Key of the images that a prompt edits, whose names may be those of other files."""
_NUMBERING = ("id", "key", "index", "idx", "name", "filename", "path", "file", "image", "img", "video", "seed", "url")
"""Last words of keys whose numbers are names; under other keys a number may be a count."""
_CUT = 10
"""Least length of the beginning of a prompt that a file is called by: a short one may be an accident."""


@dataclass(frozen=True, slots=True)
class _Key:
    """What the records say under one key."""

    name: str
    rows: dict[int, list[int]]
    """File -> the records that name it."""
    numbers: bool
    """All its values are numbers."""
    shared: bool = False
    """Numbers of groups, or one seed of all: of the records that have one, at most half have another one."""

    @property
    def rank(self) -> int:
        """How plainly it names files, 0 first."""
        return 0 if self.name in NAMING else 3 if self.numbers else 2 if self.name == _PROMPT else 1

    def holds(self, rows: Sequence[int]) -> bool:
        """Whether each file has one of the records that name it."""
        return all(row in self.rows.get(file, ()) for file, row in enumerate(rows))

    @property
    def means_files(self) -> bool:
        """Whether even one hit under it is no accident."""
        return not self.numbers or self._last in _NUMBERING

    def accident(self, running: bool) -> bool:
        """Whether hits for some of the files are one; `running`: the files are numbered one after the other."""
        if self.name == _REFERENCES or not self.means_files:
            return True
        return self.numbers and self.name not in NAMING and (self.shared or (running and self._last == "seed"))

    @property
    def _last(self) -> str:
        return ["", *re.findall(r"[A-Z]?[a-z]+|[A-Z]+", self.name)][-1].lower()


def matched(
    names: Sequence[str], records: Sequence[Record], where: str, held: Sequence[str] = ()
) -> tuple[list[int], str]:
    """(the record's number of each file, how they were matched in words).

    `names` are in `natural` order; `where`: the option and its value, for messages; `held`: the prompts that the files
    hold, "" for one without; empty: none does.

    Raises ConfigError: a key names some of the files only, two keys or records contradict each other, or the files
    could go by place in more than one way.
    """
    files = _Files(names, held)
    keys = _keys(files, records)
    whole = [key for key in keys if len(key.rows) == len(names) and _doubled(key, records) is None]
    placed = list(range(len(names))) if len(names) == len(records) else None
    best = min((key.rank for key in whole if key.means_files), default=None)
    if best is not None:
        first, *others = [key for key in whole if key.rank == best and key.means_files]
        rows = [first.rows[file][0] for file in range(len(names))]
        for other in others:
            differs = next((f for f, row in enumerate(rows) if records[other.rows[f][0]] != records[row]), None)
            if differs is not None:
                raise _refused(
                    where, f"{names[differs]!r} has one record by {first.name!r} and another by {other.name!r}"
                )
        by = "the prompts in them or their names" if first.name == _PROMPT else repr(first.name)
        return rows, f"{len(names)} files matched with {len(records)} records by {by}"
    if placed is None or not any(key.name == _PROMPT and key.holds(placed) for key in keys):
        _refuse_partial([key for key in keys if not key.accident(files.running)], names, records, where)
    for key in whole:  # numbers under a key of any name
        if placed is None or any(records[key.rows[file][0]] != records[file] for file in placed):
            raise _refused(where, f"{key.name!r} numbers the files in another order than theirs")
    if placed is None:
        raise _refused(where, f"it has {len(records)} prompts for {len(names)} files, and no value names one")
    if not one_order(names) and any(record != records[0] for record in records):
        text, number = sorted(names), sorted(names, key=natural)
        differs = next((k for k, name in enumerate(text) if name != number[k]), None)
        shown = "capitals" if differs is None else f"{number[differs]!r} or {text[differs]!r} is number {differs + 1}"
        raise _refused(where, f"nothing in it names a file, and the files have two orders ({shown}); rename them, or")
    return placed, f"{len(names)} files matched with {len(records)} records by place, from {names[0]} to {names[-1]}"


def _refused(where: str, why: str) -> ConfigError:
    after = "" if why.endswith(" or") else ";"
    return ConfigError(
        f"{where}: {why}{after} give records (.jsonl or a table) with the name of each one's file under 'image'"
    )


def _refuse_partial(keys: Sequence[_Key], names: Sequence[str], records: Sequence[Record], where: str) -> None:
    """Refuse a list of which some values name files, and none of its keys all of them."""
    for key in sorted(keys, key=lambda key: key.rank):
        doubled = _doubled(key, records)
        if doubled is not None:
            raise _refused(where, f"two records name the same file, {names[doubled]!r}, under {key.name!r}")
        lacking = [name for file, name in enumerate(names) if file not in key.rows]
        raise _refused(
            where, f"no record has the file {lacking[0]!r} under {key.name!r} ({len(lacking)} of {len(names)} lack one)"
        )
    for _, metadata in records:
        name = next((name for name in _SAYING if isinstance(metadata.get(name), str) and metadata[name].strip()), None)
        if name is not None:
            raise _refused(where, f"no record has the file {names[0]!r}; {name!r} is {metadata[name][:60]!r}")


def _doubled(key: _Key, records: Sequence[Record]) -> int | None:
    """A file that is named by two records of different content."""
    return next((f for f, rows in key.rows.items() if any(records[row] != records[rows[0]] for row in rows)), None)


def _keys(files: "_Files", records: Sequence[Record]) -> list[_Key]:
    """Keys that name at least one file."""
    rows: dict[str, dict[int, list[int]]] = {}
    words: set[str] = set()
    numbers: dict[str, list[int]] = {}
    begun: dict[int, list[int]] = {}
    for number, (text, metadata) in enumerate(records):
        for key, value in _values(metadata):
            found, as_number = files.named(value)
            for file in found:
                rows.setdefault(key, {}).setdefault(file, []).append(number)
                words |= set() if as_number else {key}
            if as_number and (said := _number(value)) is not None:
                numbers.setdefault(key, []).append(said)
        called = files.called(text)
        for file in called:
            rows.setdefault(_PROMPT, {}).setdefault(file, []).append(number)
        for file in () if called else files.begun(text):
            begun.setdefault(file, []).append(number)
    by_prompt = begun | rows.get(_PROMPT, {})
    if by_prompt:
        rows[_PROMPT] = by_prompt
        words.add(_PROMPT)
    shared = {key for key, said in numbers.items() if 2 * len(set(said)) <= len(said)}
    return [_Key(key, own, key not in words, key in shared) for key, own in rows.items()]


def _values(metadata: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of all texts and numbers; of nested ones the keys are joined by dots."""
    if is_mapping(metadata):
        for name, value in metadata.items():
            yield from _values(value, f"{key}.{name}".lstrip("."))
    elif is_list(metadata):
        for value in metadata:
            yield from _values(value, key)
    else:
        yield key, metadata


class _Files:
    """Files by their names, stems and numbers, and by the words of their names and of the prompts that they hold."""

    def __init__(self, names: Sequence[str], held: Sequence[str]) -> None:
        self.exact: dict[str, list[int]] = {}
        self.stems: dict[str, list[int]] = {}
        self.numbers: dict[int, list[int]] = {}
        self.samples: dict[int, list[int]] = {}
        self.words: dict[str, list[int]] = {}
        self.cut: dict[str, list[int]] = {}
        """Of files that hold no prompt: their names may be cut, and a number may stand before them."""
        for file, name in enumerate(names):
            stem = PurePosixPath(name).stem
            self.exact.setdefault(_folded(name), []).append(file)
            self.stems.setdefault(_folded(stem), []).append(file)
            digits = re.findall(r"\d+", stem)
            if len(digits) == 1:
                self.numbers.setdefault(int(digits[0]), []).append(file)
            elif re.fullmatch(r"\D*\d+[-_ ]\d+", stem):  # the prompt's number and the sample's
                self.samples.setdefault(int(digits[0]), []).append(file)
            called = {_words(stem), _words(re.sub(r"[-_ ]+\d+$", "", stem))}
            told = {_words(held[file])} if held and held[file] else set[str]()
            for words in told or called:
                self.words.setdefault(words, []).append(file)
            if not told:
                for words in {rest for name in called for rest in _without_numbers(name)}:
                    self.cut.setdefault(words, []).append(file)
        self.lengths = sorted({len(words) for words in self.cut if len(words) >= _CUT}, reverse=True)

    @property
    def running(self) -> bool:
        """Whether the files are numbered one after the other."""
        count, first = len(self.numbers), min(self.numbers, default=0)
        return count > 1 and max(self.numbers) == first + count - 1 and all(len(f) == 1 for f in self.numbers.values())

    def named(self, value: Any) -> tuple[list[int], bool]:
        """(files that a value is the name, the stem, the path, the address or the number of; by digits alone)."""
        if isinstance(value, str):
            path = unquote(re.split(r"[?#]", value)[0]) if "://" in value else value
            last = path.strip().replace("\\", "/").rpartition("/")[2]
            if found := self.exact.get(_folded(last)):
                return found, False
            # A name whose suffix is another one's: the file was converted.
            name = re.sub(r"\.[A-Za-z][A-Za-z0-9]{2,4}$", "", last)
            if found := self.stems.get(_folded(name)):
                return found, name.isdecimal() and name == last
        number = _number(value)
        if number is None:
            return [], True
        found = self.numbers.get(number, [])
        return (found if len(found) == 1 else self.samples.get(number, [])), True

    def called(self, text: str) -> list[int]:
        """Files that are called by a prompt, perhaps with the number of a sample after it."""
        words = _words(text)
        return self.words.get(words, []) if words and not words.isdecimal() else []

    def begun(self, text: str) -> list[int]:
        """Files that are called by the beginning of a prompt, the longest that there is."""
        words = _words(text)
        return next((self.cut[words[:size]] for size in self.lengths if words[:size] in self.cut), [])


def _without_numbers(words: str) -> Iterator[str]:
    """Words, and what is left of them without the first number, the first two, and so on."""
    yield words
    while leading := re.match(r"\d+ ", words):
        words = words[leading.end() :]
        yield words


def _number(value: Any) -> int | None:
    """The whole number that a value is, or writes."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip()):
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 2**53:
        return int(value) if value == int(value) else None
    return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _words(text: str) -> str:
    """The words of a text alone: what is no letter or digit cannot always stand in a name."""
    return re.sub(r"[\W_]+", " ", _folded(text)).strip()
