"""`flowrl new`: a commented, running file to start from."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Any, Literal

from flowrl.core.assets import table
from flowrl.core.errors import ConfigError
from flowrl.core.files import writing

Kind = Literal["reward", "method", "sampler", "suite", "config"]
STARTING = Path(__file__).parent / "starting"


def command(
    kind: Kind,
    name: str = "mine",
    path: Path = Path("."),
    short: bool = False,
    model: str | None = None,
    reward: list[str] | None = None,
    prompts: str | None = None,
    pairs: str | None = None,
    memory: float | None = None,
    hours: float | None = None,
) -> None:
    """Write a commented file to start from. A reward, method, sampler, suite or config. It runs as it is."""
    known = (model, reward or [], prompts, pairs, memory, hours)
    if kind != "config" and any(known):
        raise ConfigError(f"KIND={kind}: the options of a recipe are for KIND=config")
    print(write(kind, name, path, short=short, known=known))


def write(kind: str, name: str, folder: Path, *, short: bool = False, known: Sequence[Any] = ()) -> str:
    """Write the file; the commands that try it. `short`: a reward as one function; `known`: of a config, `Known`.

    Raises ConfigError: a bad name, there is such a file, no short one of this kind, or a recipe that cannot be.
    """
    if short and kind != "reward":
        raise ConfigError(f"--short writes a reward as one function, and KIND={kind}")
    ending = ".yaml" if kind == "config" else ".py"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(
            f"NAME={name!r} may hold letters, digits and '_', and begins with a letter; leave {ending} out"
        )
    if ending == ".py" and name in sys.stdlib_module_names:
        raise ConfigError(f"NAME={name!r} is that of a module of Python, which the file would hide; choose another one")
    file = folder / f"{name}{ending}"
    if file.exists():
        raise ConfigError(f"{file} is there already and is left as it is; choose another NAME or --path")
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_") if part) or "Mine"
    text = Template(_body(kind, name, folder, short, known))
    if iskeyword(title) or re.search(rf"\b{title}\b", text.template):  # a class Config would hide that of the options
        title = f"My{title}"
    plain = re.fullmatch(r"[\w./~-]+", str(file))
    place = str(file) if plain else json.dumps(str(file), ensure_ascii=False)  # as YAML reads it
    choices = table(STARTING / "choices.yaml")
    option = Template(choices["options"].get(kind, "")).substitute(place=place)
    checks = f'import flowrl; print(*flowrl.check({json.dumps(str(file), ensure_ascii=False)}), sep="\\n")'
    words = {"name": name, "title": title, "file": shlex.quote(str(file)), "check": shlex.quote(checks)}
    words["option"] = shlex.quote(option)
    with writing(file):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text.substitute(words), encoding="utf-8")
    lines = [Template(line).substitute(words) for line in choices["tries"][kind]]
    return "\n".join([f"{file} is written. Try it:", *(f"    {line}" for line in lines)])


def _body(kind: str, name: str, folder: Path, short: bool, known: Sequence[Any]) -> str:
    """Text of the file, a template."""
    if kind != "config":
        return (STARTING / f"{'short_' * short}{kind}.py.txt").read_text(encoding="ascii")
    from flowrl.commands._recipe import Draft, Known

    given = Known(*known)
    given.ask()
    return str(Draft(name, given, folder)).replace("$", "$$")
