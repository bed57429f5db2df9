"""The texts of the commands' arguments and options, which are in options.yaml."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from flowrl.commands._arguments import noted, option
from flowrl.core.assets import table


def with_texts(command: Callable[..., None], name: str) -> Callable[..., None]:
    """A command with the texts of its parameters in options.yaml; one that is not there has them in its annotations.

    Raises ValueError: a parameter without a text, or a text without a parameter.
    """
    texts = _texts().get(name)
    if texts is not None:
        hints = {one: hint for one, hint in get_type_hints(command).items() if one != "return"}
        if hints.keys() != texts.keys():
            raise ValueError(f"options.yaml: {name}: {', '.join(hints.keys() ^ texts.keys())}: text or parameter lacks")
        command.__annotations__ = {one: Annotated[hint, _told(**texts[one])] for one, hint in hints.items()}
    return command


@functools.cache
def _texts() -> dict[str, dict[str, dict[str, Any]]]:
    """Command -> parameter -> the arguments of `_told`."""
    return table(Path(__file__).with_name("options.yaml"))


def _told(what: str, more: str = "", argument: str = "", **of_option: Any) -> Any:
    return typer.Argument(metavar=argument, help=noted(what, more)) if argument else option(what, more, **of_option)
