"""How the arguments and options of the commands get their help texts, and the display that commands share."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flowrl.display.display import Display


_MORE: dict[str, str] = {}
"""First sentence of a help text -> the rest, which the reference page has and the terminal does not."""


def option(
    what: str,
    change: str = "",
    *,
    name: str | None = None,
    least: float | None = None,
    most: float | None = None,
    group: str | None = None,
) -> Any:
    """An option of a command. `what` is the first sentence of its help text: what it is; `--help` shows this alone.
    `change`: what it changes, and a default that is not a value; on docs/reference/commands.md after the first. `name`:
    such as "--set"; None: that of the parameter. `least` and `most` are bounds. `group`: heading of `--help` under
    which it stands, such as "With --suite"; None: Options.
    """
    names = [name] if name else []
    return typer.Option(*names, help=noted(what, change), min=least, max=most, rich_help_panel=group)


def noted(what: str, change: str) -> str:
    """The first sentence of a help text, after the rest is kept for `in_full`."""
    if _MORE.setdefault(what, change) != change:
        raise ValueError(f"two options say {what!r} and go on differently; let the first sentences differ")
    return what


def in_full(text: str) -> str:
    """The whole text of an option or argument, from the sentence that `--help` shows."""
    return f"{text} {_MORE.get(text, '')}".rstrip()


@contextmanager
def showing(quiet: bool = False, as_json: bool = False) -> "Generator[Display]":
    """The display of a command, which tells its end too; the first process shows it. Raises ConfigError: both asked."""
    from flowrl.core.errors import ConfigError, Remedy, ending_of
    from flowrl.display.display import opened

    if quiet and as_json:
        raise ConfigError(
            "--quiet and --json: one of them; the second is for programs",
            [Remedy(without="--quiet"), Remedy(without="--json")],
        )
    main = os.environ.get("RANK", "0") == "0"
    with opened("json" if as_json else "quiet" if quiet else "auto", main=main) as display:
        try:
            yield display
        except SystemExit:  # of the launcher, whose first process has told its end
            raise
        except BaseException as error:
            display.send("end", **ending_of(error))
            raise
        display.send("end", exit_code=0, **({"status": "finished"} | display.result))
