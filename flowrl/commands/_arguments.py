"""Arguments that several commands share. In a help text a blank line begins what the option changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="Configuration: a YAML file, a run folder, or the name of a recipe (flowrl list recipes).\n\n"
        "Relative paths in a file start from its folder.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Options that replace those of CONFIG, such as optim.learning_rate=1e-4 or rewards.0.weight=2.\n\n"
        "Values are YAML; relative paths start from the working directory.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="Number of processes on this machine.\n\n"
        "They share the samples of an iteration. More of them than GPUs need the backend gloo.",
    ),
]
Page = Annotated[
    Path | None,
    typer.Option(
        "--page",
        help="Markdown file that takes the result.\n\n"
        "The text between its two marks of this benchmark is replaced. Default: print alone.",
    ),
]


def reward_entries(rewards: Iterable[str], options: Iterable[str], *, prefixes: bool) -> dict[str, dict[str, Any]]:
    """Name -> entry of each reward of a command line, as a configuration has it.

    Args:
        rewards: names, dotted paths or .py files, PREFIX=NAME if `prefixes`.
        options: `key=value` of the only reward, or `NAME.key=value`, NAME being the prefix where there is one.
        prefixes: whether a reward may have a prefix.

    Raises:
        ConfigError: two rewards of one name, or an option that does not name its reward.
    """
    from flowrl.core.errors import ConfigError
    from flowrl.core.strict import apply_override

    result: dict[str, dict[str, Any]] = {}
    for word in rewards:
        before, equals, after = word.partition("=") if prefixes else ("", "", word)
        reward, prefix = (after, before) if equals else (word, None)
        name = prefix or (Path(reward).stem if reward.endswith(".py") else reward)
        if name in result:
            remedy = f"give one a prefix, --reward PREFIX={reward}" if prefixes else "serve one of them on another port"
            raise ConfigError(f"--reward {word}: two rewards are called {name!r}; {remedy}")
        result[name] = {"path" if reward.endswith(".py") else "name": reward}
        if prefix is not None:
            result[name]["prefix"] = prefix
    for word in options:
        # A dotted module path is a name with dots: the longest name that fits is meant.
        owner = max((name for name in result if word.startswith(f"{name}.")), key=len, default=None)
        if owner is None and len(result) > 1:
            raise ConfigError(f"--set {word}: name its reward, NAME.key=value with NAME one of {', '.join(result)}")
        apply_override(result[owner or next(iter(result))], word.removeprefix(f"{owner}."))
    return result
