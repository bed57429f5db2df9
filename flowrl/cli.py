"""The command line. Commands import what they need when they run, so that --help is quick."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from flowrl.core.startup import own_process
from flowrl.core.subprocesses import watch_launcher

DEBUG = "FLOWRL_DEBUG"

PAGES = {
    "train": "docs/tutorials/first_reward.md",
    "sweep": "docs/tutorials/compare_methods.md",
    "ask": "docs/watching.md",
    "plan": "docs/tutorials/one_card.md",
    "doctor": "docs/tutorials/cluster.md",
    "sample": "docs/judging.md",
    "eval": "docs/judging.md",
    "gallery": "docs/gallery.md",
    "diagnose": "docs/troubleshooting.md",
    "watch": "docs/watching.md",
    "vote": "docs/votes.md",
    "score": "docs/tutorials/first_reward.md",
    "pairs": "docs/tutorials/preferences.md",
    "serve": "docs/tutorials/reward_server.md",
    "list": "docs/configuration.md",
    "new": "docs/tutorials/new_method.md",
    "convert-config": "docs/migration.md",
    "export": "docs/using_lora.md",
}
"""Command -> the page that shows it at work."""
REFERENCE = "docs/reference/commands.md"
"""The page with the whole texts of all options."""
COMMANDS = tuple(PAGES)


class Group(TyperGroup):
    """A group whose `--help` has the whole first sentence of each command."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the commands in their order."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=500)) for name, each in commands if each])


app = typer.Typer(
    name="flowrl",
    cls=Group,
    help="Align diffusion and flow-matching generators with rewards.",
    epilog=f"Start: {PAGES['train']}, your own reward in ten minutes. In full: {REFERENCE}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: panels need half as many lines again
    context_settings={"max_content_width": 100},
)


class Command(TyperCommand):
    """A command whose `--help` puts the options of a group under a heading of their own."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the arguments, the options, and each group of them in the order of the first of it."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if one.param_type_name == "argument" else vars(one).get("rich_help_panel")
                sections.setdefault(heading or "Options", []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _version(asked: bool) -> None:
    if asked:
        from flowrl import __version__

        print(f"flowrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks on the screen too; train.log always has them.")
    ] = False,
) -> None:
    """Align diffusion and flow-matching generators with rewards."""
    if debug:
        os.environ[DEBUG] = "1"  # for the workers of --processes too


def _register() -> None:
    for name in COMMANDS:
        module = importlib.import_module(f"flowrl.commands.{name.replace('-', '_')}")
        epilog = f"Page: {PAGES[name]}. Every word in full: {REFERENCE}"
        app.command(name=name, cls=Command, epilog=epilog)(module.command)


def _fail(text: str, code: int, *, of_one_process: bool = False) -> NoReturn:
    # All workers meet the same error, and only the first prints it, unless it is of one process alone.
    rank = os.environ.get("RANK", "0")
    if rank == "0" or of_one_process:
        print(f"flowrl{f' (process {rank})' if rank != '0' else ''}: {text}", file=sys.stderr)
    raise SystemExit(code)


def main() -> None:
    """Run a command. Exit code: 2 a fault in the input, 1 a failure, 128 + n after signal n."""
    own_process()
    watch_launcher()
    # The working directory comes last in the import path: components of dotted paths may lie there.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if "WORLD_SIZE" not in os.environ:
        _run()
        return
    # In a process group, tearing down the interpreter while gloo's threads run may abort it (exit code 134) after
    # everything is saved, so the process exits at once.
    code = 0
    try:
        _run()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run() -> None:
    try:
        _register()
        app(standalone_mode=True)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BaseException as error:
        handle(error)


def handle(error: BaseException) -> NoReturn:
    """Turn a failure into one message and an exit code; an unexpected error keeps its traceback."""
    from flowrl.core.errors import Fault, Stopped

    if isinstance(error, Stopped):
        raise SystemExit(128 + error.number)
    if isinstance(error, Fault) and DEBUG in os.environ:
        traceback.print_exception(error)
    if isinstance(error, Fault):
        _fail(str(error), error.exit_code, of_one_process=error.of_one_process)
    raise error
