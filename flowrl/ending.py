"""How a run ends before its end: what is saved, and what its folder and the terminal say of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from flowrl import state
from flowrl.distributed import ask_for_time, command_line
from flowrl.errors import Abandoned, Fault, Stopped, described, exited
from flowrl.metrics import journal, log
from flowrl.status import SUMMARY

if TYPE_CHECKING:
    from flowrl.trainer import Trainer


def begin(trainer: Trainer) -> None:
    """A run that is killed before its first evaluation has a summary too."""
    if not (trainer.folder.path / SUMMARY).is_file():
        trainer.folder.write_json(SUMMARY, {"status": "running", "iterations": 0})


def leave(trainer: Trainer, error: BaseException) -> BaseException:
    """Save the last finished iteration, say in the folder how the run ended, and return what to leave with.

    Args:
        trainer: of the run; its folder is open.
        error: what ends it: `Abandoned` after a signal, or a failure on this process or on all of them.
    """
    if isinstance(error, Abandoned):
        return _stop(trainer)
    last = exited(error) if isinstance(error, SystemExit) else error
    try:
        note = _rescue(trainer, last, _shared(trainer, error))
    except Exception as second:  # the first failure is the one to tell
        note = f"the end of iteration {trainer.iteration} could not be saved: {second}"
    _tell(trainer, last, note)
    return last


def resuming() -> str:
    """The command that goes on."""
    command = command_line()
    return command if "--resume" in command.split() else f"{command} --resume"


def _stop(trainer: Trainer) -> BaseException:
    number = trainer.signals.first(trainer.world)
    try:
        note = _rescue(trainer, Stopped(number), agreed=True)
    except Exception as error:  # what was to be saved is lost: no clean stop
        _tell(trainer, error, "")
        return error
    if trainer.world.main:
        log.info("stopped after iteration %d; go on with the same command and --resume", trainer.iteration)
        tell_end(trainer, "stopped", f"signal {number}", note)
    return Stopped(number)


def _rescue(trainer: Trainer, error: BaseException, agreed: bool) -> str:
    """Save the last finished iteration if that is possible; what came of it.

    `agreed`: every process does this now. Else the first one does what it can alone: its weights are everybody's
    unless they are split.
    """
    done = trainer.iteration
    if done <= trainer.start or trainer.attempted == done:
        return ""
    if not trainer.between_updates:
        return f"iteration {done + 1} failed in its update: the last checkpoint is the newest state"
    diverged = isinstance(error, Fault) and error.status == "diverged"
    if diverged and agreed and trainer.world.any(not _finite(trainer)):
        return f"the weights after iteration {done} are not finite and were not saved"
    if agreed:
        state.save(trainer, done)
    elif trainer.world.main and not state.is_split(trainer):
        ask_for_time()
        state.save(trainer, done, alone=True)
    else:
        return ""
    return f"iteration {done} is saved"


def _shared(trainer: Trainer, error: BaseException) -> bool:
    """Whether all processes leave with an error, or with what it explains."""
    return any(each is not None and trainer.world.shares(each) for each in (error, error.__cause__))


def _finite(trainer: Trainer) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in trainer.weights.values.values())


def _tell(trainer: Trainer, error: BaseException, note: str) -> None:
    """The failure in train.log, in summary.json and, where nobody else tells it, on the screen."""
    world, text = trainer.world, str(error) if isinstance(error, Fault) else described(error)
    if world.main:
        journal.error("%s", text)  # the command line prints what the first process leaves with
    elif not _shared(trainer, error) and not (isinstance(error, Fault) and error.of_one_process):
        log.error("process %d: %s", world.rank, text)
    journal.debug("the traceback of it", exc_info=error)
    if not world.main:
        return
    if note:
        log.info("%s", note)
    status, command = error.status if isinstance(error, Fault) else Fault.status, resuming()
    if trainer.iteration:
        planned = trainer.config.iterations
        log.info("%s after iteration %d of %d; go on with: %s", status, trainer.iteration, planned, command)
    try:
        tell_end(trainer, status, text, note)
    except OSError as full:
        log.warning("%s cannot be written: %s", trainer.folder.path / SUMMARY, full)


def tell_end(trainer: Trainer, status: str, reason: str, note: str = "") -> None:
    """`summary.json`: what there is of it stays, with how the run ended, where, and how it goes on."""
    file = trainer.folder.path / SUMMARY
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none yet, or it is to be written anew
        known = {}
    known = known if isinstance(known, dict) else {}
    if known.get("status") == "finished":
        return  # whatever was to come after the end, it has not begun
    ended = {"status": status, "reason": reason, "iterations": trainer.iteration, "command": resuming()}
    ended |= {"saved": note} if note else {}
    seconds = {"seconds": round(trainer.seconds, 1)}
    trainer.folder.write_json(SUMMARY, known | ended | seconds)
