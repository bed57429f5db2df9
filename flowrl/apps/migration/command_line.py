"""A launcher script of a shell, read as text: its one training command, with the variables it sets put in."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.apps.migration.table import REMEDY, Key, Source
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.core.strict import parse_yaml, read_text

_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
"""Words of a shell between which a line may be done once, often or never."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_COUNTS = ("num_processes", "nproc_per_node")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def read_command(file: Path, keys: Mapping[str, Key], *, bare_flags: bool) -> Source:
    """The configuration that the one training command of a launcher states. `keys` are the flags that the tool knows;
    others are kept as text. `bare_flags`: a switch takes no value, as with argparse; else it may take true or false.

    Raises ConfigError: no such command or several, a variable that the file does not set, or something to be executed.
    """
    commands, variables, inside = [], dict[str, str](), 0
    for line in re.sub(r"\\\r?\n", " ", read_text(file, str(file))).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{file}: {line.strip()[:60]!r} cannot be read ({error}); correct its quotes") from None
        if not words:
            continue
        ends = {words[0].rstrip(";"), words[-1].rstrip(";")}
        inside += (words[0] in _OPENS) - bool(ends & _CLOSES)
        found = [_SET.fullmatch(word) for word in words[words[0] == "export" :]]
        settings = [setting for setting in found if setting is not None]
        if len(settings) == len(found) and not inside and not any(setting[0].endswith(";") for setting in settings):
            for setting in settings:
                variables[setting[1]] = _filled(file, setting[2], variables)
            continue
        for setting in settings:  # whether and how it is set is known to a shell alone
            variables.pop(setting[1], None)
        if any(word.endswith(".py") for word in words) and any(word.startswith("--") for word in words):
            commands.append([_filled(file, word, variables) for word in words])
    if len(commands) != 1:
        raise ConfigError(
            f"{file}: it has {len(commands)} commands that start a .py file with options, and one is read; give a "
            "file with that command alone"
        )
    words = commands[0]
    start = next(number for number, word in enumerate(words) if word.endswith(".py"))
    launcher = _flags(file, words[:start])
    values, notes = _values(file, words[start + 1 :], keys, bare_flags=bare_flags)
    if rest := sorted(launcher.keys() - {*_COUNTS, "nnodes"}):
        notes = (*notes, f"Options of the launcher are not read: {', '.join(rest)}; flowrl runs under torchrun.")
    return Source(file, Path(words[start]).name, values, {}, _processes(file, launcher), notes)


def _filled(file: Path, word: str, variables: dict[str, str]) -> str:
    if "$(" in word or "`" in word:
        raise ConfigError(f"{file}: {word!r} would have to be executed; {REMEDY}")

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise ConfigError(f"{file}: ${name} is not set in the file by a line that is always done; {REMEDY}")
        return variables[name]

    filled = _VARIABLE.sub(value, word)
    if "$" in filled:
        raise ConfigError(f"{file}: {word!r} cannot be read; {REMEDY}")
    return filled


def _flags(file: Path, words: list[str]) -> dict[str, str]:
    """Name -> value of the launcher's options."""
    result: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            result[name.replace("-", "_")] = value if equals else ("" if after.startswith("--") else after)
    return result


def _processes(file: Path, launcher: dict[str, str]) -> int | None:
    """The number of processes over all machines, if the launcher states it."""
    name = next((each for each in _COUNTS if each in launcher), None)
    if name is None:
        return None
    count, nodes = launcher[name], launcher.get("nnodes", "1") if name == "nproc_per_node" else "1"
    if not (count.isdecimal() and nodes.isdecimal()):
        return None
    return int(count) * int(nodes)


def _values(
    file: Path, words: list[str], keys: Mapping[str, Key], *, bare_flags: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Key -> value of the flags, and notes on those given twice, of which the last counts."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("&", ";", "&&", "|", ">", "2>&1", "||", ">>"):
            break
        if not word.startswith("--"):
            raise ConfigError(f"{file}: {word!r} belongs to no option; correct the command")
        name, equals, text = word[2:].partition("=")
        name = name if bare_flags else name.replace("-", "_")
        if name not in keys:
            raise ConfigError(f"{file}: --{name}: there is no such option; {suggest(name, list(keys))}correct it")
        if name in values:
            notes.append(f"{name} is given twice: the last one counts, as in the tool itself.")
        switch = isinstance(keys[name].default, bool)
        if switch and not equals and (bare_flags or not rest or rest[0].lower() not in (*_TRUE, *_FALSE)):
            values[name] = True
            continue
        if not equals:
            if not rest:
                raise ConfigError(f"{file}: --{name}: it needs a value; correct the command")
            text = rest.pop(0)
        values[name] = _typed(file, name, text, keys[name].default, bare_flags=bare_flags)
    return values, tuple(notes)


def _typed(file: Path, name: str, text: str, default: Any, *, bare_flags: bool) -> Any:
    """A flag's value in the type of its default."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if bare_flags or text.lower() not in (*_TRUE, *_FALSE):
            raise ConfigError(f"{file}: --{name}={text}: it is a switch; leave out the value")
        return text.lower() in _TRUE
    return parse_yaml(text, f"{file}: --{name}")
