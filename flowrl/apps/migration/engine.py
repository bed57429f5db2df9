"""From a read configuration to a recipe: lines with the keys they came from, and a list of the keys without one.

A key cannot be lost: whatever the configuration sets and no line has used is listed with its reason.
"""

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from flowrl.apps.migration.table import Source, Tool
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest

_WIDTH = 120
_INDENT = 2
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "no": "float32"}
UNKNOWN_STEPS = 1000
"""Iterations of a recipe whose configuration states no end."""
_SECTIONS = (
    *("name", "seed", "iterations", "output", "model", "data", "rollout", "algorithm", "rewards"),
    *("optim", "eval", "checkpoint", "deterministic"),
)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain_name(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


@dataclass(frozen=True, slots=True)
class Line:
    """One value of the recipe, with the keys it came from; none: the tool has it in its code."""

    value: Any
    keys: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A key that the recipe does without."""

    reason: str
    changes: bool
    """Whether results change."""


class Draft:
    """A recipe in the making. `folder`: of the recipe, which its relative paths start from."""

    def __init__(self, tool: Tool, source: Source, gpus: int | None, folder: Path) -> None:
        self.tool, self.source, self.folder = tool, source, folder
        self._asked = gpus
        self.lines: dict[str, Line] = {}
        self.rewards: list[Line] = []
        self.listed: dict[str, Listed] = {}
        self._used: set[str] = set()
        for key in [key for key in source.values if key not in tool.keys]:
            near = suggest(key, sorted(tool.keys)).rstrip()
            text = f"{tool.name} has no such key{f'; {near}' if near else ''}"
            if tool.refuses_unknown:
                raise ConfigError(f"{source.file}: {key}={source.values[key]!r}: {text}")
            self.leave(key, text, changes=True)

    def given(self, key: str) -> bool:
        """Whether the configuration itself sets a key."""
        return key in self.source.values

    def get(self, key: str) -> Any:
        """The value of a key: the configuration's, its base's, or the published default."""
        values = self.source.values
        return values[key] if key in values else self.source.base.get(key, self.tool.keys[key].default)

    def number(self, key: str, *, least: float | None = None) -> int | float:
        """The value of a key that is a number. Raises ConfigError: it is none, not finite, or below `least`."""
        value = self.get(key)
        if not is_number(value):
            raise self.fault(key, "it must be a number")
        if least is not None and value < least:
            raise self.fault(key, f"it must be at least {least:g}")
        return value

    def real(self, key: str, *, least: float | None = None) -> float:
        """The value of a key that is a number, as it is written where fractions may be."""
        return float(self.number(key, least=least))

    def whole(self, key: str, *, least: int = 1) -> int:
        """The value of a key that is a whole number."""
        value = self.number(key, least=least)
        if value != int(value):
            raise self.fault(key, "it must be a whole number")
        return int(value)

    def text(self, key: str) -> str:
        """The value of a key that is text; a number or a word that YAML reads as one is taken as it stands.

        Raises ConfigError: it is none: `null` would become the name None.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.fault(key, "it must be text")
        return str(value)

    def switch(self, key: str) -> bool:
        """The value of a key that is true or false; a text such as "false" is neither."""
        return self.choice(key, {True: True, False: False})

    def choice(self, key: str, values: dict[Any, Any]) -> Any:
        """What a key's value stands for."""
        value = self.get(key)
        if isinstance(value, list | dict | tuple) or value not in values:
            raise self.fault(key, f"it must be one of {', '.join(map(repr, values))}")
        return values[value]

    def place(self, path: str, *roots: Path) -> str | None:
        """A path of the other tool, relative to the recipe's folder; an absolute one stays.

        None: neither a root nor the working directory has it.
        """
        found = next((root / path for root in (*roots, Path.cwd()) if (root / path).exists()), None)
        if found is None or os.path.isabs(path):
            return None if found is None else path
        # Removing "link/.." from a path changes its meaning.
        plain = Path(os.path.abspath(found))
        same = plain.exists() and plain.samefile(found)
        return os.path.relpath(plain if same else found.resolve(), self.folder.resolve())

    def copy(self, *keys: str, note: str = "") -> None:
        """Write the option of each key, whose value stands as it is, of the type of its default."""
        kinds: dict[type, Callable[[str], Any]] = {int: self.whole, float: self.real, bool: self.switch, str: self.text}
        for key in keys:
            entry = self.tool.keys[key]
            self.put(entry.options, kinds[type(entry.default)](key), key, note=note)

    def put_head(self, name: str, seed: str, otherwise: str, why: str) -> None:
        """Write the name of the run and its seed, from their keys; without a name `otherwise`, with `why` as note."""
        given = self.get(name)
        self.put("name", plain_name(str(given or otherwise)), name, note="" if given else why)
        self.put("seed", self.whole(seed, least=0), seed, note="random streams differ")

    def put_adam(self, prefix: str) -> None:
        """Write the options of AdamW, from the keys that many scripts give it."""
        self.copy(f"{prefix}learning_rate")
        if self.switch(f"{prefix}use_8bit_adam"):
            self.put("optim.name", "adamw_8bit", f"{prefix}use_8bit_adam")
        self.put_betas(f"{prefix}adam_beta1", f"{prefix}adam_beta2")
        self.copy(*(f"{prefix}{name}" for name in ("adam_epsilon", "adam_weight_decay", "max_grad_norm")))

    def put_betas(self, *keys: str) -> None:
        """Write the two decays of AdamW, a key each."""
        self.put("optim.betas", [self.real(key) for key in keys], *keys)

    def put_size(self, option: str, size: int, key: str) -> None:
        """Write a number of rows that go through a network at once."""
        self.put(option, size, key, note="per process, memory alone")

    def put_place(self, option: str, *keys: str) -> None:
        """Write an option that is a path, or a name where there is no such path, from the first of its keys."""
        path = self.text(keys[0])
        self.put(option, self.place(path) or path, *keys)

    def put_prompts(self, folder: str, names: Sequence[str], keys: Sequence[str], *roots: Path) -> None:
        """Write the files of prompts that lie in a folder of the other tool: of names with {} the first that exists."""
        for option, part in (("data.prompts", "train"), ("data.eval_prompts", "test")):
            inside = [os.path.join(folder, name.format(part)) for name in names]
            found = next(filter(None, (self.place(each, *roots) for each in inside)), None)
            note = "relative to this file" if found else "not found: relative to this file, if it is put there"
            self.put(option, found or inside[-1], *keys, note=note)

    def fault(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.source.file}: {key}={self.get(key)!r}: {reason}; correct it in the file")

    def gpus(self) -> int:
        """The number of GPUs of the converted run. Raises ConfigError: nothing states it, or two places differ."""
        stated, asked = self.source.gpus, self._asked
        if stated is None and asked is None:
            raise ConfigError(
                f"{self.source.file}: its batch sizes are per GPU and it does not state the number of GPUs; give the "
                "number that the run used: --gpus N"
            )
        if stated is not None and asked is not None and stated != asked:
            raise ConfigError(
                f"--gpus {asked}: {self.source.file} states {stated}, and its numbers are made for that; leave out "
                "--gpus, or correct the file"
            )
        found = asked if stated is None else stated
        assert found is not None
        if found < 1:
            raise ConfigError(f"{self.source.file}: it states {found} GPUs; give at least 1: --gpus N")
        return found

    def quotient(self, top: int, below: int, option: str, how: str) -> int:
        """A whole number that a recipe needs. Raises ConfigError: the division leaves a rest."""
        share = Fraction(top, below)
        if share.denominator != 1:
            raise ConfigError(
                f"{self.source.file}: {option} would be {how} = {top}/{below}, which is no whole number; correct the "
                "batch sizes, or --gpus"
            )
        return int(share)

    def put(self, option: str, value: Any, *keys: str, note: str = "") -> None:
        """Write an option, which came from `keys`."""
        self.lines[option] = Line(value, keys, note)
        self._used.update(keys)

    def reward(self, entry: dict[str, Any], *keys: str, note: str = "") -> None:
        """Add a reward. Raises ConfigError: a weight below 0."""
        if entry.get("weight", 1.0) < 0:
            raise self.fault(keys[0], f"{entry['name']} has a weight below 0, which trains towards what is worse")
        self.rewards.append(Line(entry, keys, note))
        self._used.update(keys)

    def leave(self, key: str, reason: str, *, changes: bool) -> None:
        """List a key that the recipe does without."""
        self.listed[key] = Listed(reason, changes)

    def unread(self, reason: str, *keys: str, changes: bool = False) -> None:
        """List those of the keys that the configuration sets."""
        for key in filter(self.given, keys):
            self.leave(key, reason, changes=changes)

    def finish(self) -> None:
        """List what is set and no line has used."""
        for key in self.source.values:
            if key not in self._used and key not in self.listed:
                entry = self.tool.keys[key]
                value, reason = self.source.values[key], entry.how
                if entry.options:
                    reason = f"this configuration has no use for it ({entry.how or entry.options})"
                self.leave(key, reason, changes=(bool(entry.options) or entry.changes) and value != entry.default)


def convert(tool: Tool, file: str, gpus: int | None, folder: Path) -> Draft:
    """The recipe of another tool's configuration. `file` and `gpus` are those of the command line; `folder` is that of
    the recipe.

    Raises ConfigError: a file that cannot be read as that tool's, or a value that no recipe can have; with the key.
    """
    draft = Draft(tool, tool.read(file), gpus, folder)
    if gpus is not None:
        draft.gpus()  # refuses a number that differs from the file's, whether or not a rule needs it
    tool.rules(draft)
    draft.finish()
    return draft


def recipe_text(draft: Draft) -> str:
    """The text of the recipe."""
    source, tool = draft.source, draft.tool
    head = [
        f"Converted by flowrl convert-config from {tool.name}: {source.file.name}, {source.label}.",
        "Each line names the key it came from; (default): the key's published default, not set in the file.",
        *source.notes,
    ]
    comments = [*head, *(f"N{text[1:]}" for text in left(draft))]
    lines = [part for text in comments for part in _comment(text, 0)]
    return "\n".join([*lines, *_tree(draft)]) + "\n"


def left(draft: Draft) -> Iterator[str]:
    """Sentences about the keys that the recipe does without, those that change results first."""
    for key, entry in sorted(draft.listed.items(), key=lambda item: not item[1].changes):
        what = "changes results" if entry.changes else "harmless"
        shown = f"{key}={_scalar(draft.source.values[key])}" if draft.given(key) else key
        yield f"not converted, {what}: {shown}: {entry.reason}"


def _comment(text: str, depth: int) -> list[str]:
    start = " " * depth + "# "
    return textwrap.wrap(
        " ".join(text.split()), _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def _scalar(value: Any) -> str:
    """A value in YAML's flow form on one line, ASCII."""
    value = list(value) if isinstance(value, tuple) else value
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    except yaml.YAMLError:  # a value of Python alone, which no line has: of a listed key
        text = repr(value)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _origin(draft: Draft, line: Line) -> str:
    keys = [key if draft.given(key) or key not in draft.tool.keys else f"{key} (default)" for key in line.keys]
    return ": ".join(filter(None, (", ".join(keys) or draft.tool.name, line.note)))


def _written(draft: Draft, text: str, line: Line) -> list[str]:
    """A line of YAML with its comment behind it, or above it where there is no room."""
    depth = len(text) - len(text.lstrip())
    whole = f"{text}  # {_origin(draft, line)}"
    if len(whole) <= _WIDTH:
        return [whole]
    short = f"{text}  # {_origin(draft, Line(line.value, line.keys, ''))}"
    if len(short) > _WIDTH:
        return [*_comment(_origin(draft, line), depth), text]
    return [*_comment(line.note, depth), short]


def _tree(draft: Draft) -> Iterator[str]:
    options = [*draft.lines, *(["rewards"] if draft.rewards else [])]
    before: list[str] = []
    for option in sorted(options, key=lambda option: _SECTIONS.index(option.partition(".")[0])):
        if option == "rewards":
            yield "rewards:"
            for line in draft.rewards:
                yield from _written(draft, f"{' ' * _INDENT}- {_scalar(line.value)}", line)
            continue
        parts = option.split(".")
        for depth, part in enumerate(parts[:-1]):
            if before[: depth + 1] != parts[: depth + 1]:
                yield f"{' ' * _INDENT * depth}{part}:"
        line = draft.lines[option]
        indent = " " * _INDENT * (len(parts) - 1)
        yield from _written(draft, f"{indent}{parts[-1]}: {_scalar(line.value)}", line)
        before = parts[:-1]
