"""What a run folder says of the user's files, and how they differ from what there is now or in another run.

Read from text files alone. `flowrl/run/inputs.py` makes and keeps the record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.core.assets import embedded_prompts
from flowrl.core.errors import ConfigError
from flowrl.core.files import damaged, read_object

log = logging.getLogger("flowrl")

FILE, COPIES = "inputs.json", "inputs"
ACCEPT = "--accept-changes"

_RENAMED = {"data.pairs": "data.pairs.path", "data.eval_pairs": "data.pairs.eval"}
"""Keys of the sets in records of flowrl 0.1.0 (flowrl/config/retired.py)."""

Kind = Literal["code", "prompts", "text", "set"]


@dataclass(frozen=True, slots=True)
class Input:
    """One file, or one set of several."""

    key: str
    """Of the configuration."""
    kind: Kind
    path: str
    sha256: str
    """Of its bytes; of a set, of what its scan found."""
    bytes: int
    copy: str | None = None
    """Relative to the run folder."""
    about: str = ""
    """Of a set: what it holds, in words."""

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def place(self) -> tuple[str, str]:
        """By which it is found again: an imported file has the key of the one that imports it."""
        return self.key, self.name if self.kind == "code" else ""


@dataclass(frozen=True, slots=True)
class Record:
    """What a run folder says of its inputs."""

    inputs: tuple[Input, ...]
    changes: tuple[dict[str, Any], ...] = field(default=())
    """Accepted ones: after which iteration, and in words what."""

    def by_place(self) -> dict[tuple[str, str], Input]:
        return {one.place: one for one in self.inputs}


def say(text: str, *values: Any) -> None:
    """A warning of the first process alone, also before it has joined the others."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(text, *values)


def read(run: Path) -> Record | None:
    """What a run folder says; None of an older one, which says nothing.

    Raises:
        ConfigError: the file cannot be understood.
    """
    file = run / FILE
    if not file.is_file():
        return None
    remedy = "delete it: the run then goes on as one of which nothing was recorded"
    told = read_object(file, remedy)
    try:
        inputs = tuple(Input(**one | {"key": _RENAMED.get(one["key"], one["key"])}) for one in told["inputs"])
        return Record(inputs, tuple(told["changes"]))
    except (KeyError, TypeError) as error:
        raise damaged(file, error, remedy) from error


def changes(run: Path, record: Record, now: Sequence[Input]) -> dict[tuple[str, str], str]:
    """What differs of each input that both have, in words."""
    old = record.by_place()
    pairs = [(old[one.place], one) for one in now if one.place in old]
    return {
        one.place: _describe_difference(then, one, run if then.copy is None else run / then.copy, file_of(one))
        for then, one in pairs
        if then.sha256 != one.sha256
    }


def file_of(one: Input) -> Path:
    """Where it lies now."""
    return embedded_prompts(one.path) or Path(one.path)


def require_comparable(runs: Sequence[Path], *, accept: bool) -> list[str]:
    """Which files had other contents in one run than in another, if that is accepted.

    Raises:
        ConfigError: there are such, and they are not accepted.
    """
    records = [(run, record) for run in runs if (record := read(run)) is not None]
    result = []
    for (first, one), (second, other) in itertools.combinations(records, 2):
        known = one.by_place()
        for now in other.inputs:
            then = known.get(now.place)
            if then is not None and then.name == now.name and then.sha256 != now.sha256:
                files = [run / (part.copy or "") for run, part in ((first, then), (second, now))]
                result.append(f"{first} (then) and {second} (now): {_describe_difference(then, now, *files)}")
    if result and not accept:
        raise ConfigError(
            f"these runs were made with other contents of a file: {'; '.join(result)}. Compare runs of one reward and "
            f"one list of prompts, or add {ACCEPT}: they are then shown side by side, on no common chart"
        )
    return result


def require_same(run: Path, record: Record, now: Sequence[Input], *, accept: bool) -> list[str]:
    """What differs, if that is accepted.

    Raises:
        ConfigError: something differs and is not accepted.
    """
    result = list(changes(run, record, now).values())
    if result and not accept:
        raise ConfigError(
            f"{run} was made with other contents: {'; '.join(result)}. Bring back what it was, start a run of another "
            f"name, or add {ACCEPT}: then what is there now counts, and nothing is compared with earlier scores"
        )
    return result


def require_unedited(run: Path, now: Sequence[Input], *, accept: bool) -> None:
    """Refuse files that were edited since the run; others that a command names instead are left alone.

    Raises:
        ConfigError: one was edited, and that is not accepted.
    """
    record = read(run)
    if record is None:
        say("%s has no %s: whether your files are what they were is not known", run, FILE)
        return
    old = record.by_place()
    same = [one for one in now if one.place in old and old[one.place].path == one.path]
    for line in require_same(run, record, same, accept=accept):
        say("accepted: %s", line)


def _describe_difference(then: Input, now: Input, before_file: Path, after_file: Path) -> str:
    """What differs between two contents of a file: lines, and the first that is another one."""
    what = f"{now.key}: {now.path}"
    if now.kind == "set":
        return f"{what} held {then.about} then, and {now.about} now, or their files have other names or sizes"
    before, after = _lines(before_file), _lines(after_file)
    if before is None or after is None:
        return f"{what} had {then.bytes} bytes then, {now.bytes} now, with another SHA-256"
    kept = f"the old one is {before_file}"
    pairs = enumerate(itertools.zip_longest(before, after), 1)
    number, (old, new) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, (None, None)))
    if not number:
        return f"{what} ends with a line break in one and without in the other ({kept})"
    place = f"line {number} {_short(old, 'was')} then and {_short(new, 'is')} now"
    return f"{what} had {len(before)} lines then, {len(after)} now; {place} ({kept})"


def _lines(file: Path) -> list[str] | None:
    """None of what is no text, or gone."""
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.removesuffix("\n").split("\n") if text else []


def _short(line: str | None, verb: str) -> str:
    if line is None:
        return f"{verb} not there"
    return f"{verb} {line if len(line) <= 60 else line[:57] + '...'!r}"


def stand_ins(run: Path, tree: dict[str, Any]) -> None:
    """In a run's configuration, the copies of the files that are gone; says so."""
    record = read(run)
    for one in () if record is None else record.inputs:
        *path, last = one.key.split(".")
        node: Any = tree
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.get(key, {})
        if one.copy is None or node.get(last) != one.path or embedded_prompts(one.path) or Path(one.path).exists():
            continue
        if (run / one.copy).is_file():
            node[last] = str((run / one.copy).absolute())
            say("%s: %s is gone; its copy %s is used instead", one.key, one.path, run / one.copy)


def fingerprint(values: Any) -> str:
    """SHA-256 of plain data, 16 digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def set_of(key: str, path: str, about: str, values: Mapping[str, Any]) -> Input:
    """An input that is known by what its scan found."""
    return Input(key, "set", path, fingerprint(values), 0, None, about)
