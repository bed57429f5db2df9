"""The command line. Commands import what they need when they run, so that --help is quick."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from flowrl.commands.texts import with_texts
from flowrl.core.registry import suggest
from flowrl.core.startup import own_process
from flowrl.core.subprocesses import watch_launcher

DEBUG = "FLOWRL_DEBUG"

GROUPS = {
    "Train": {
        "train": "docs/tutorials/first_reward.md",
        "plan": "docs/tutorials/one_card.md",
        "sweep": "docs/tutorials/compare_methods.md",
        "ask": "docs/watching.md",
        "pairs": "docs/tutorials/preferences.md",
    },
    "Judge": {
        "eval": "docs/judging.md",
        "sample": "docs/judging.md",
        "gallery": "docs/gallery.md",
        "watch": "docs/watching.md",
        "vote": "docs/votes.md",
        "diagnose": "docs/troubleshooting.md",
    },
    "Tools": {
        "list": "docs/configuration.md",
        "new": "docs/tutorials/new_method.md",
        "score": "docs/tutorials/first_reward.md",
        "serve": "docs/tutorials/reward_server.md",
        "export": "docs/using_lora.md",
        "convert-config": "docs/migration.md",
        "doctor": "docs/tutorials/cluster.md",
    },
}
"""Heading of `flowrl --help` -> command -> the page that shows it at work."""
PAGES = {name: page for group in GROUPS.values() for name, page in group.items()}
REFERENCE = "docs/reference/commands.md"
"""The page with the whole texts of all options."""
COMMANDS = tuple(PAGES)
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
"""The class of all faults in the words of a command line, by its public heir: typer keeps it in a private module."""


@contextmanager
def _nearest_named(params: Sequence[Any]) -> Generator[None]:
    """Complete the error about an unknown option of `params`, or an unknown choice of one, with the nearest."""
    try:
        yield
    except _UsageError as error:
        told = vars(error)
        choice = re.fullmatch(r"(?:Value error, )?'(.*?)' is not one of (.*)\.", error.message)
        if choice is not None:
            meant = suggest(choice[1], re.findall(r"'(.*?)'", choice[2]))
            told["message"] = f"{error.message.removesuffix('.')}; {meant}".rstrip("; ")
        elif "possibilities" in told:  # an option that there is not
            known = [word for one in params for word in (*one.opts, *one.secondary_opts) if word.startswith("--")]
            told["message"] = f"{error.message}; {suggest(told['option_name'], known)}".rstrip("; ")
            told["possibilities"] = ()
        raise


class Group(TyperGroup):
    """A group whose `--help` has the whole first sentence of each command, flowrl's below the headings of GROUPS."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the commands in their order."""
        widest = max(map(len, self.commands))
        own = self.commands.keys() == PAGES.keys()
        for heading, names in (GROUPS if own else {"Commands": self.commands}).items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:{widest}}", self.commands[name].get_short_help_str(500)) for name in names]
                )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command; for an unknown option the nearest is named."""
        with _nearest_named(self.get_params(ctx)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word; an unknown one is refused with the nearest."""
        if args[0] not in self.commands:
            known = tuple(self.commands)
            ctx.fail(f"No such command {args[0]!r}; {suggest(args[0], known)}there are: {', '.join(known)}")
        return super().resolve_command(ctx, args)


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
    """A command whose `--help` has headings for groups of options, and which names what a wrong word may mean."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words; for an unknown option or choice the nearest is named."""
        with _nearest_named(self.get_params(ctx)):
            return super().parse_args(ctx, args)

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
        app.command(name=name, cls=Command, epilog=epilog)(with_texts(module.command, name))


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
