"""The form of a tool's table: each key of its configuration, with its default and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    title: str
    """Name and version read, for the page."""
    keys: Mapping[str, Key]
    read: Callable[[str], Source]
    """Reads FILE of the command line."""
    rules: Callable[[Any], None]
    """Writes the lines of a Draft (engine.py)."""
    refuses_unknown: bool
    """Whether an unknown key is refused, as the tool itself does, and not listed."""
    form: str
    """What FILE is, for the page."""
    rewards: Mapping[str, tuple[dict[str, Any], str]]
    """Name of a reward -> our entry of it and a remark; empty: the tool names none."""
