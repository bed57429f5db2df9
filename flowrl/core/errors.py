"""Failures that end a command with a message instead of a traceback, each with its exit code.

2: a fault in the input (configuration, files, weights) that the user can mend; 1: a failure while running.
"""

import json
import shlex
import sysconfig
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

_OURS = Path(__file__).resolve().parents[1]
_REWARDS = _OURS.parent / "rewards"  # in a checkout; an installed flowrl has them in flowrl/
_LIBRARIES = (_OURS, _REWARDS, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")))
_COMPONENTS = (_REWARDS, *(_OURS / name for name in ("rewards", "algorithms", "samplers", "models")))


def described(error: BaseException) -> str:
    """One line about an exception of any code: class, text, and the file and line to mend.

    That is the last frame in a user's file, else in a component of flowrl, else the last frame.
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) or not frames:  # a SyntaxError says where it is
        return text
    users = [(file, line) for file, line in frames if file.is_file() and not _inside(file, _LIBRARIES)]
    file, line = (users or [each for each in frames if _inside(each[0], _COMPONENTS)] or frames)[-1]
    return f"{text} ({file.name}:{line})"


def _inside(file: Path, folders: tuple[Path, ...]) -> bool:
    return any(file.resolve().is_relative_to(folder) for folder in folders)


SECTIONS = ("algorithm", "checkpoint", "data", "eval", "guard", "model", "optim", "rewards", "rollout")
"""Mappings of a configuration; a key of a remedy that begins with one and a dot is whole."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What ends a fault when it is done to the letter. One of the four fields is given.

    `tests/remedies/` follows every remedy that the code gives, so a remedy has no ellipsis and no "for example".
    """

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options to set together, dotted key -> value, as in the words after `flowrl train CONFIG`. A component gives the
    keys of its own options, and `below` makes them whole."""
    command: str = ""
    """A command line to run; the fault's own command works after it, or in its place."""
    without: str = ""
    """Words of the command line, each flag with its value, or a dotted key of the configuration, to leave out."""
    flag: str = ""
    """A flag of the command line, with its value, to give."""

    def __str__(self) -> str:
        if self.without:
            return f"leave out {self.without}"
        if self.flag:
            return f"give {self.flag}"
        if self.command:
            return f"run {self.command}"
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        return " ".join(shlex.quote(f"{key}={word}") for key, word in words.items())

    def below(self, place: str) -> "Remedy":
        """The same with `place.` before the keys of a component; keys that begin with a section stay."""
        settings = {_whole(key, place): value for key, value in self.settings.items()}
        without = self.without if self.without.startswith("-") else _whole(self.without, place)
        return replace(self, settings=settings, without=without)


_Way = Remedy | Mapping[str, Any]


def _whole(key: str, place: str) -> str:
    section, dot, _ = key.partition(".")
    return key if not key or not place or (dot and section in SECTIONS) else f"{place}.{key}"


class Advised(Exception):
    """An exception whose text ends with its remedies, any of which will do.

    `...; try optim.batch_size=8, or leave out --json`

    `words` stand before the remedies, one or several; a mapping stands for the `Remedy` with these settings.
    """

    def __init__(self, words: object, remedies: "_Way | Sequence[_Way]" = ()) -> None:
        super().__init__(words)
        given = [remedies] if isinstance(remedies, Remedy | Mapping) else remedies
        self.remedies = tuple(each if isinstance(each, Remedy) else Remedy(each) for each in given)

    def __str__(self) -> str:
        return super().__str__() + advised(self.remedies)


def advised(remedies: Sequence[Remedy]) -> str:
    """The end of a message: its remedies, or nothing."""
    text = ""
    for number, each in enumerate(remedies):
        again = bool(each.settings) and number > 0 and bool(remedies[number - 1].settings)
        text += f"{', or ' if number else '; '}{'try ' if each.settings and not again else ''}{each}"
    return text


def told(error: BaseException) -> str:
    """The text of an exception without its remedies."""
    return str(error).removesuffix(advised(remedies_of(error)))


def remedies_of(error: BaseException, place: str = "") -> tuple[Remedy, ...]:
    """The remedies of an exception, with the keys of a component below `place`."""
    return tuple(each.below(place) for each in error.remedies) if isinstance(error, Advised) else ()


class OptionError(Advised, ValueError):
    """A value that a component refuses; who knows the component's place makes a ConfigError of it."""


class Fault(Advised):
    """A failure whose text is for the user: what, where, which value, and the remedies."""

    exit_code = 1
    status = "failed"
    """Status in summary.json of a run that it ends."""
    of_one_process = False
    """Whether one process of several may meet it alone, and so prints it itself."""

    @classmethod
    def about(cls, error: BaseException, before: str = "", after: str = "", place: str = "") -> Self:
        """A fault that says more about an exception, and keeps its remedies. `before` begins the text, `after` stands
        between it and the remedies; `place` is the dotted place of the component that raised it.
        """
        return cls(f"{before}{told(error)}{after}", remedies=remedies_of(error, place))


class ConfigError(Fault, ValueError):
    """A configuration, a file or a folder that the user can mend."""

    exit_code = 2


class UnknownName(Fault, ValueError):
    """There is no component of that name; the message lists the names."""

    exit_code = 2


class ModelError(Fault, ValueError):
    """A model that cannot be loaded or used as configured; the message says what to do."""

    exit_code = 2


class CheckpointError(Fault, RuntimeError):
    """A checkpoint that cannot be trusted; the message says what is safe and what to do."""

    exit_code = 2


class UnwritableCheckpoint(CheckpointError):
    """A checkpoint that could not be written."""

    exit_code = 1


class WriteError(Fault, OSError):
    """A file that could not be written while running: a full disk, a folder that became read-only."""

    of_one_process = True


class Moved(Fault, OSError):
    """The run folder was moved or deleted while the run was under way."""

    of_one_process = True


class UploadError(Fault, RuntimeError):
    """Files that could not be sent to a hub; they are kept on this disk."""


class OutOfMemory(Fault, RuntimeError):
    """The device or the host ran out of memory; `planning/out_of_memory.py` adds the plan and remedies. `words` are the
    library's message, `phases` those of the run that the error left, the innermost first.
    """

    of_one_process = True

    def __init__(self, words: str, phases: list[str], advice: str = "") -> None:
        super().__init__(words)
        self.words, self.phases, self.advice = words, phases, advice

    def __str__(self) -> str:
        # Of the outer phases only an evaluation adds something to the inner one.
        inner, *outer = self.phases
        where = f"{inner} ({outer[0]})" if outer and outer[0] == "evaluation" else inner
        return f"out of memory in the phase {where}: {self.words}{self.advice}"


class RewardError(Fault, RuntimeError):
    """A reward broke its contract; the message names the reward and the remedy."""

    exit_code = 2


class RewardFailure(RewardError):
    """A reward failed while the run was under way: its code, its server, or too many of its samples."""

    exit_code = 1


class Diverged(Fault, RuntimeError):
    """The model makes numbers that are not finite; the message says since when, and what to do."""

    status = "diverged"
    option = ""
    """Option of which a resumed run needs another value; "": none would do."""


class Overshot(Diverged):
    """It does so since an update: the run needs an earlier state and a lower learning rate."""

    option = "optim.learning_rate"


class DecoderOverflow(Diverged):
    """Only the decoder does so: the trained weights are sound."""

    option = "model.vae_precision"


class ParityError(Fault, RuntimeError):
    """The replayed log-probs differ from the rollout's by more than the gate allows."""


class LaunchError(Fault, RuntimeError):
    """The processes of a run do not fit together."""


class Elsewhere(Fault, RuntimeError):
    """Another process failed in a common operation; message, exit code and status are that process's."""

    def __init__(self, text: str, exit_code: int = 1, status: str = "failed") -> None:
        super().__init__(text)
        self.exit_code, self.status = exit_code, status


class LostProcess(Fault, RuntimeError):
    """Another process has ended while this one waited for it."""


class Exited(Fault, RuntimeError):
    """Code of a run, such as a reward, called `sys.exit`."""


def exited(error: SystemExit) -> Exited:
    """The failure that a `sys.exit` in the code of a run is, whatever its number."""
    where = described(error).rpartition(" (")[2].removesuffix(")")
    return Exited(
        f"the code of this run called sys.exit({'' if error.code is None else repr(error.code)}) in {where}; let a "
        "reward or another component raise an exception if it cannot go on"
    )


@contextmanager
def no_exit() -> Generator[None]:
    """Turn a `sys.exit` inside the block into a failure. Raises Exited: in place of SystemExit."""
    try:
        yield
    except SystemExit as error:
        raise exited(error) from error


class Abandoned(BaseException):
    """Work was interrupted by a signal; its results are lost.

    Not an `Exception`, so that a user's code that catches all of those does not swallow it.
    """


class Stopped(Exception):
    """The run was ended by a signal and its state saved; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def ending_of(error: BaseException) -> dict[str, Any]:
    """The facts of the object "end" (docs/watching.md) for a command that fails: exit code, status and reason."""
    if isinstance(error, Stopped):
        return {"exit_code": 128 + error.number, "status": "stopped", "reason": f"signal {error.number}"}
    if isinstance(error, KeyboardInterrupt):
        return {"exit_code": 130, "status": "stopped", "reason": "interrupted"}
    if isinstance(error, Fault):
        status = "refused" if error.exit_code == 2 else error.status
        return {"exit_code": error.exit_code, "status": status, "reason": str(error)}
    return {"exit_code": 1, "status": "failed", "reason": described(error)}
