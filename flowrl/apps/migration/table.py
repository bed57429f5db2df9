"""The form of a tool's table: each key of its configuration, with its default and what becomes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.assets import table
from flowrl.core.strict import parse_yaml, read_text

REMEDY = "the file is read and never executed; write the value itself"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of another tool's configuration."""

    default: Any
    """Its published default."""
    options: str
    """Options of flowrl that it decides, with commas; empty: it has no counterpart."""
    how: str = ""
    """The conversion; without a counterpart the reason why it has none."""
    changes: bool = False
    """Without a counterpart: whether leaving it out changes results."""
    readers: tuple[str, ...] = ()
    """Parts of the tool that alone read it; empty: all."""


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration of another tool, read and not executed."""

    file: Path
    label: str
    """Name of the configuration: of a function, or of the file."""
    values: Mapping[str, Any]
    """Dotted key -> value of the keys that the configuration sets."""
    base: Mapping[str, Any]
    """Dotted key -> value of keys that a base of it leaves at the published default."""
    gpus: int | None
    """Number of GPUs that the file states; None: it states none."""
    notes: tuple[str, ...] = ()
    """What the reader took for granted."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool whose configurations can be converted."""

    name: str
    keys: Mapping[str, Key]
    read: Callable[[str], Source]
    """Reads FILE of the command line."""
    rules: Callable[[Any], None]
    """Writes the lines of a Draft (engine.py)."""
    rewards: Mapping[str, tuple[dict[str, Any], str]]
    """Name of a reward -> our entry of it and a remark; empty: the tool names none."""
    title: str
    """Name and version read, for the page."""
    form: str
    """What FILE is, for the page."""
    refuses_unknown: bool = True
    """Whether an unknown key is refused, as the tool itself does, and not listed."""


def read_keys(tool: str) -> dict[str, Key]:
    """The keys of a tool, from its table in keys/, whose head says what a row is; lists are tuples here."""
    file = Path(__file__).with_name("keys") / f"{tool}.yaml"
    result: dict[str, Key] = {}
    for name, found in parse_yaml(read_text(file, str(file)), str(file)).items():
        rows, readers = (found, tuple(name.split())) if isinstance(found, dict) else ({name: found}, ())
        for key, (default, options, *rest) in rows.items():
            default = tuple(default) if isinstance(default, list) else default
            result[key] = Key(default, options, *rest[:1], changes=rest[1:] == ["changes"], readers=readers)
    return result


def read_rewards(tool: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Name of a tool's reward -> our entry of it and a remark, from keys/rewards.yaml."""
    return {name: (entry, remark) for name, (entry, remark) in read_table("rewards", tool).items()}


def read_table(file: str, tool: str) -> dict[str, Any]:
    """The part of a tool of a file of keys/ that has one for each."""
    return table(Path(__file__).parent / "keys" / f"{file}.yaml")[tool]
