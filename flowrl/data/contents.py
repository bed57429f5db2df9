"""Records of the user's files in run folders, and how two records differ.

Only text files are read. `flowrl/run/inputs.py` writes the record.
"""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.core.assets import embedded_prompts
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import damaged, is_list, read_object

log = logging.getLogger("flowrl")

FILE, COPIES = "inputs.json", "inputs"
ACCEPT = "--accept-changes"

Kind = Literal["code", "prompts", "text", "set"]


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a run: one file, or a set of several."""

    key: str
    """Key of the configuration that names it."""
    kind: Kind
    path: str
    sha256: str
    """SHA-256 of a file's bytes, or of the result of a set's scan."""
    bytes: int
    """Size of a file; 0 for a set."""
    copy: str | None = None
    """Copy in the run folder, relative to it; null: not copied."""
    about: str = ""
    """Contents of a set in words."""

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def place(self) -> tuple[str, str]:
        """Identity in a record: (key, name); an imported file has the key of the file that imports it."""
        return self.key, self.name if self.kind == "code" else ""


@dataclass(frozen=True, slots=True)
class Record:
    """Inputs of a run."""

    inputs: tuple[Input, ...]
    changes: tuple[dict[str, Any], ...] = ()
    """Accepted changes: {"iteration": after which one, "what": sentences}, of options with "options": true."""

    def with_options(self, iteration: int, what: Sequence[str]) -> "Record":
        """The record with a change of options, which is noted once."""
        change = {"iteration": iteration, "what": list(what), "options": True}
        return self if not what or change in self.changes else Record(self.inputs, (*self.changes, change))

    def by_place(self) -> dict[tuple[str, str], Input]:
        return {one.place: one for one in self.inputs}


def say(text: str, *values: object) -> None:
    """Log a warning on the first process alone, also before the processes have joined."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(text, *values)


def read(run: Path) -> Record | None:
    """The record of a run folder; None if it has none. Raises ConfigError: the file is damaged."""
    file = run / FILE
    if not file.is_file():
        return None
    remedy = "delete it: the run then goes on as one without a record"
    record = read_object(file, remedy)
    try:
        inputs = tuple(Input(**one) for one in record["inputs"])
        return Record(inputs, tuple(record["changes"]))
    except (KeyError, TypeError) as error:
        raise damaged(file, error, remedy) from error


def changes(run: Path, record: Record, now: Sequence[Input]) -> dict[tuple[str, str], str]:
    """Differences of the inputs that both have: place -> sentence."""
    old = record.by_place()
    pairs = [(old[one.place], one) for one in now if one.place in old]
    return {
        one.place: _describe_difference(then, one, run if then.copy is None else run / then.copy, file_of(one))
        for then, one in pairs
        if then.sha256 != one.sha256
    }


def file_of(one: Input) -> Path:
    """Present file of an input."""
    return embedded_prompts(one.path) or Path(one.path)


def require_comparable(runs: Sequence[Path], *, accept: bool) -> list[str]:
    """Sentences about files whose contents differ between runs.

    Raises ConfigError: there are such files, and `accept` is false.
    """
    records = [(run, record) for run in runs if (record := read(run)) is not None]
    result: list[str] = []
    for (first, one), (second, other) in itertools.combinations(records, 2):
        known = one.by_place()
        for now in other.inputs:
            then = known.get(now.place)
            if then is not None and then.name == now.name and then.sha256 != now.sha256:
                files = [run / (part.copy or "") for run, part in ((first, then), (second, now))]
                result.append(f"{first} (then) and {second} (now): {_describe_difference(then, now, *files)}")
    if result and not accept:
        raise ConfigError(
            f"these runs were made with different contents of a file: {'; '.join(result)}. Compare runs of one reward "
            f"and one list of prompts; accepted changes are shown side by side without a common chart",
            Remedy(flag=ACCEPT),
        )
    return result


def require_same(run: Path, record: Record, now: Sequence[Input], *, accept: bool) -> list[str]:
    """Sentences about the inputs that have changed. Raises ConfigError: one has changed, and `accept` is false."""
    result = list(changes(run, record, now).values())
    if result and not accept:
        raise ConfigError(
            f"{run} was made with other contents: {'; '.join(result)}. Restore them or start a run of another name; "
            "where they are accepted, the present contents count, and nothing is compared with earlier scores",
            Remedy(flag=ACCEPT),
        )
    return result


def require_unedited(run: Path, now: Sequence[Input], *, accept: bool) -> None:
    """Refuse files that were edited since the run; files that a command names in their place are not compared.

    Raises ConfigError: one was edited, and `accept` is false.
    """
    record = read(run)
    if record is None:
        say("%s has no %s: it is not known whether your files have changed", run, FILE)
        return
    old = record.by_place()
    same = [one for one in now if one.place in old and old[one.place].path == one.path]
    for line in require_same(run, record, same, accept=accept):
        say("accepted: %s", line)


def _describe_difference(then: Input, now: Input, before_file: Path, after_file: Path) -> str:
    """Difference of two contents of a file: numbers of lines, and the first line that differs."""
    what = f"{now.key}: {now.path}"
    if now.kind == "set":
        return f"{what} held {then.about} then and {now.about} now, or its files have other names or sizes"
    before, after = _lines(before_file), _lines(after_file)
    if before is None or after is None:
        return f"{what} had {then.bytes} bytes then, {now.bytes} now, with another SHA-256"
    kept = f"the old one is {before_file}"
    pairs = enumerate(itertools.zip_longest(before, after), 1)
    number, (old, new) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, (None, None)))
    if not number:
        return f"{what} differs in the line break at its end ({kept})"
    place = f"line {number} {_short(old, 'was')} then and {_short(new, 'is')} now"
    return f"{what} had {len(before)} lines then, {len(after)} now; {place} ({kept})"


def _lines(file: Path) -> list[str] | None:
    """Lines of a file; None if it is missing or not text."""
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.removesuffix("\n").split("\n") if text else []


def _short(line: str | None, verb: str) -> str:
    if line is None:
        return f"{verb} missing"
    return f"{verb} {line if len(line) <= 60 else line[:57] + '...'!r}"


def stand_ins(run: Path, tree: dict[str, Any]) -> None:
    """Replace missing files in a run's configuration by their copies in its folder, with a warning."""
    record = read(run)
    for one in () if record is None else record.inputs:
        *path, last = one.key.split(".")
        node: Any = tree
        for key in path:
            node = node[int(key)] if is_list(node) else node.get(key, {})
        if one.copy is None or node.get(last) != one.path or embedded_prompts(one.path) or Path(one.path).exists():
            continue
        if (run / one.copy).is_file():
            node[last] = str((run / one.copy).absolute())
            say("%s: %s is missing; its copy %s is used instead", one.key, one.path, run / one.copy)


def fingerprint(values: object) -> str:
    """First 16 hexadecimal digits of the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def set_of(key: str, path: str, about: str, values: Mapping[str, Any]) -> Input:
    """The input of a set; `values` are the result of its scan."""
    return Input(key, "set", path, fingerprint(values), 0, None, about)
