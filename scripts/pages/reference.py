"""docs/reference/: the options of a configuration and its components, the commands, the Python API, from code.

Nothing is loaded or downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

import flowrl
from flowrl.cli import COMMANDS as COMMAND_NAMES
from flowrl.commands._arguments import in_full
from flowrl.commands._listed import credit_rules, described
from flowrl.commands._option_texts import REQUIRED, OptionText, field_texts, option_texts
from flowrl.commands.texts import with_texts
from flowrl.config.schema import RunConfig
from flowrl.core import registry
from flowrl.credit.advantages import AdvantageConfig
from flowrl.scoring.options import RewardEntry

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "reference"
WRITTEN = "Written by `python -m scripts.pages` from the code; do not edit.\n"
TITLES = {
    "models": "Options of the models",
    "samplers": "Options of the samplers",
    "rewards": "Options of the rewards",
}
NOTES = {
    "models": "The keys below `model`. What each family is and needs: [Models](../models.md).",
    "samplers": "The keys below `rollout.sampler`. The formulas of each: `flowrl list samplers NAME`.",
    "rewards": "The keys of an entry of `rewards`. What each scores, needs and gives: [Rewards](../rewards.md).",
}
CONFIGURATION = """
Every key of a configuration. How to write one, and how keys are replaced on the command line:
[Writing a configuration](../configuration.md). `flowrl plan FILE` shows the values of a run. A key with "as below" is
a mapping, whose own keys follow it. A component has further options, on a page of their own:
[models](models.md), [samplers](samplers.md), [methods](algorithms.md), [rewards](rewards.md),
[advantage rules](credits.md). The columns of `metrics.jsonl`: [Metrics](../metrics.md).
"""
CREDITS = """
The keys below `algorithm.advantages`, for methods that credit a sample by an advantage rule. The rules, values of
`name`:
"""
METHODS = """
The keys below `algorithm`, with type and default, stand on the page of each method; `flowrl list algorithms NAME` shows
them in the terminal.
"""
COMMANDS = """
`flowrl COMMAND --help` shows the first sentence of each in the terminal.

## Exit codes

| code | meaning |
|---|---|
| 0 | finished |
| 1 | a failure while running |
| 2 | the input is at fault and can be corrected; nothing was trained |
| 130, 143 | a signal came, or `flowrl ask RUN stop` (143); the state is saved |
"""
API = """
What `import flowrl` offers: `flowrl.NAME`. Longer examples: [As a library](../library.md). The contracts that an own
component keeps: `Reward` and `Card`, `Sampler`, `Method` with its three kinds, and `check`, which tests them
([CONTRIBUTING.md](../../CONTRIBUTING.md)).
"""
LOSSES = """
Functions from tensors to tensors, for any loop: they know no model, no rollout and no trainer, and are what the methods
of `flowrl/algorithms/` call. A value for each row, float64 where policies differ in the last digits; you take the mean.
The examples are tests. [A notebook](../../notebooks/flow_grpo_from_parts.ipynb) has a loop around one of them.

Log-prob and KL of a step are methods of the Gaussian that a sampler gives, `flowrl.samplers.base.StepDistribution`:
`log_prob(x_next, form)` and `kl(other, divisor=..., dt=...)`, both [B].
"""
LOSS_MODULES = ("flowrl.losses.ratio", "flowrl.losses.matching", "flowrl.losses.preference")


def cell(text: str) -> str:
    """A text for a cell of a table: no bar, and no tag outside of code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if odd % 2 else part.replace("<", "&lt;") for odd, part in enumerate(parts))


def code(text: str) -> str:
    return cell(f"`{text}`")


def value(default: str) -> str:
    return default if default in (REQUIRED, "as below") else code(default)


def table(options: Iterable[OptionText], prefix: str = "") -> str:
    rows = (f"| {code(prefix + one.name)} | {cell(one.type)} | {value(one.default)} | {cell(one.about)} |"
            for one in options)  # fmt: skip
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def configuration() -> str:
    """The page of a run's configuration: one section a top-level mapping, the plain keys first."""
    plain, sections = [], {}
    for one in option_texts(RunConfig):
        top = one.name.partition(".")[0]
        sections.get(top, plain).append(one)
        if one.default == "as below" or one.name == "data":
            sections.setdefault(top, [])
    below = "".join(f"\n## {top}\n\n{table(rows)}" for top, rows in sections.items() if rows)
    return f"# Configuration\n\n{WRITTEN}{CONFIGURATION}\n## The run\n\n{table(plain)}{below}"


def components(kind: str) -> str:
    """The page of a kind: the options that all have first, then those of each."""
    names = registry.names(kind)
    facts = {name: described(kind, name) for name in names}
    options = {name: [OptionText(**one) for one in facts[name]["options"]] for name in names}
    counts = Counter(one for each in options.values() for one in each)
    shared = [one for one in options[names[0]] if counts[one] == len(names)]
    result = f"# {TITLES[kind]}\n\n{WRITTEN}\n{NOTES[kind]} `flowrl list {kind} NAME` shows them in the terminal.\n"
    if kind == "rewards":
        result += f"\n## Of every entry\n\n{table(option_texts(RewardEntry))}"
    if shared:
        result += f"\n## Of all of them\n\n{table(shared)}"
    for name in names:
        first = cell(facts[name]["about"].partition("\n\n")[0])
        own = [one for one in options[name] if one not in shared]
        lack = "No options" if not shared else "No further options"
        result += f"\n## {name}\n\n{first}\n\n{table(own) if own else f'{lack}.' + chr(10)}"
    return result


def methods() -> str:
    """The page that leads to the options of each method, which stand on its own."""
    rows = ""
    for name in registry.names("algorithms"):
        first = cell(described("algorithms", name)["about"].partition("\n\n")[0])
        rows += f"| [{name}](../algorithms/{name}.md#options) | {first} |\n"
    return f"# Options of the methods\n\n{WRITTEN}{METHODS}\n| method | what it is |\n|---|---|\n{rows}"


def credits() -> str:
    rules = "".join(f"| `{name}` | {cell(about)} |\n" for name, about in credit_rules().items())
    head = f"# Options of the advantage rules\n\n{WRITTEN}{CREDITS}\n| rule | what it does |\n|---|---|\n{rules}"
    return f"{head}\n{table(option_texts(AdvantageConfig))}"


# ---- commands


def commands() -> str:
    sections = (section(f"flowrl {name}", command(name)) for name in COMMAND_NAMES)
    return f"# Commands\n\n{WRITTEN}{COMMANDS}{''.join(sections)}"


def command(name: str) -> Any:
    """A command of the command line, by its module."""
    module = importlib.import_module(f"flowrl.commands.{name.replace('-', '_')}")
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    one.command(name=name)(with_texts(module.command, name))
    return typer.main.get_command(one)


def section(name: str, asked: Any) -> str:
    """A command's section."""
    about = inspect.cleandoc(asked.help or "").replace("\f", "").replace("<", "&lt;")
    rows = [row for one in asked.params if (row := parameter(one)) is not None]
    result = f"\n## {name}\n\n{about}\n"
    if rows:
        result += "\n" + "\n".join(["| word | default | meaning |", "|---|---|---|", *rows]) + "\n"
    return result


def parameter(one: Any) -> str | None:
    """The row of an argument or option; None for --help and what is hidden."""
    facts = vars(one)
    if facts.get("hidden") or one.name == "help":
        return None
    words = ", ".join([*one.opts, *one.secondary_opts])
    if not words.startswith("-"):
        words = facts.get("metavar") or one.name.upper()
    default = facts["default"]
    plain = isinstance(default, bool | int | float | str) and default not in (False, "")
    shown = "required" if one.required else code(str(default)) if plain else ""
    about = in_full(facts.get("help") or "")
    if facts.get("rich_help_panel"):
        about = f"{facts['rich_help_panel']}: {about}"
    return f"| {code(words)} | {shown} | {cell(about)} |"


# ---- Python API


def api() -> str:
    parts = (entry(name, getattr(flowrl, name)) for name in flowrl.__all__ if name != "__version__")
    return f"# Python API\n\n{WRITTEN}{API}{''.join(parts)}"


def losses() -> str:
    """The page of the pure losses: the functions of each module, in its order."""
    result = f"# Losses\n\n{WRITTEN}{LOSSES}"
    for module in map(importlib.import_module, LOSS_MODULES):
        result += f"\n## {module.__name__}\n\n{inspect.cleandoc(module.__doc__ or '')}\n"
        own = [one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == module.__name__]
        result += "".join(
            f"\n### {one.__name__}\n\n{block(one.__name__, one)}" for one in own if one.__name__[0] != "_"
        )
    return result


def entry(name: str, thing: Any) -> str:
    """The section of an exported name: where it is, its signature, its docstring, its public members."""
    result = f"\n## {name}\n\n`{thing.__module__}.{thing.__qualname__}`\n\n{block(name, thing)}"
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        rows = [f"| {code(key)} | {cell(text)} |" for key, text in members(thing)]
        result += "\n" + "\n".join(["| member | meaning |", "|---|---|", *rows]) + "\n" if rows else ""
    return result


def block(name: str, thing: Any) -> str:
    text = inspect.cleandoc(thing.__doc__ or "")
    return f"```text\n{name}{signature(thing)}\n\n{text}\n```\n"


def signature(thing: Any) -> str:
    try:
        return re.sub(r"<[^<>]*>", "...", str(inspect.signature(thing)).replace("'", ""))
    except (TypeError, ValueError):
        return ""


def members(thing: type) -> Iterator[tuple[str, str]]:
    """Public members that a class defines itself, with the first paragraph of their texts."""
    fields, texts = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else (), field_texts(thing)
    own = {one.name: texts.get(one.name, "") for one in fields}
    yield from own.items()
    for key, value in vars(thing).items():
        made = value.fget if isinstance(value, property) else value
        if key.startswith("_") or key in own or not inspect.isfunction(made) or not made.__doc__:
            continue
        text = inspect.cleandoc(made.__doc__).partition("\n\n")[0]
        yield (key if isinstance(value, property) else key + parameters(made)), text


def parameters(made: Any) -> str:
    names: Sequence[str] = [one for one in inspect.signature(made).parameters if one != "self"]
    return f"({', '.join(names)})"


def pages() -> dict[Path, str]:
    """File -> text of every page of the reference."""
    kinds = {f"{kind}.md": components(kind) for kind in TITLES}
    others = {
        "configuration.md": configuration(),
        "algorithms.md": methods(),
        "credits.md": credits(),
        "commands.md": commands(),
        "api.md": api(),
        "losses.md": losses(),
    }
    return {PAGES / name: text for name, text in (others | kinds).items()}
