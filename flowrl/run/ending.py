"""The early end of a run, by a signal or a failure: what is saved, and the messages in its folder and terminal."""

import math

from flowrl.core.errors import Abandoned, Diverged, Fault, Moved, Overshot, Remedy, described, exited
from flowrl.core.files import known_object
from flowrl.display.console import journal, log, verdict
from flowrl.run import checkpoint
from flowrl.run.changes import accepting
from flowrl.run.folder import RunFolder
from flowrl.run.launch import ask_for_time, command_line
from flowrl.run.state import Clock, Saver, is_split
from flowrl.run.status import ENDED, SUMMARY
from flowrl.training.options import OptimConfig
from flowrl.training.signals import Signals
from flowrl.training.world import World

_USUAL_RATE = OptimConfig().learning_rate
"""Highest learning rate that is advised after a divergence."""


def resuming() -> str:
    """The command that resumes this run."""
    command = command_line()
    return command if "--resume" in command.split() else f"{command} --resume"


class Ending:
    """Ends a run early, which was resumed after the iteration `start` (0: the beginning) of the `planned` ones."""

    def __init__(
        self, folder: RunFolder, world: World, signals: Signals, clock: Clock, *, start: int, planned: int
    ) -> None:
        self.folder, self.world, self.signals, self.clock = folder, world, signals, clock
        self.start, self.planned = start, planned
        self.saver: Saver | None = None
        """Saver of the session; None: there is no session yet."""

    @property
    def iteration(self) -> int:
        """The last finished iteration."""
        return self.start if self.saver is None else max(self.start, self.saver.session.iteration)

    def begin(self) -> None:
        """Write a first summary, for a run that is killed before its first evaluation."""
        if self.world.main and not (self.folder.path / SUMMARY).is_file():
            self.folder.write_json(SUMMARY, {"status": "running", "iterations": 0})

    def leave(self, error: BaseException) -> BaseException:
        """Save the last finished iteration, record the end in the folder, and return the exception to raise.

        `error` is `Abandoned` after a signal, or a failure on this process or on all of them.
        """
        if isinstance(error, Abandoned):
            return self._stop()
        last = self._moved(exited(error) if isinstance(error, SystemExit) else error)
        try:
            note = self._rescue(last, self._shared(error))
        except Moved:  # as the first failure says
            note = ""
        except Exception as second:  # the first failure is the one to report
            note = f"the end of iteration {self.iteration} could not be saved: {second}"
        if isinstance(last, Diverged) and last.option and self.saver is not None:
            rate = min(self.saver.session.config.optim.learning_rate / 10, _USUAL_RATE)
            value = f"{rate:.1g}" if last.option == Overshot.option else "float32"
            last.remedies = (Remedy(command=accepting(resuming(), {last.option: value})),)
        self._report(last, note)
        return last

    def _moved(self, error: BaseException) -> BaseException:
        """An error, or `Moved` where a file could not be written since the folder is elsewhere by now."""
        if isinstance(error, OSError):
            try:
                self.folder.require_own()
            except Moved as moved:
                moved.__cause__ = error
                return moved
        return error

    def _stop(self) -> BaseException:
        stopped = self.signals.stopped(self.world)
        try:
            note = self._rescue(stopped, agreed=True)
        except Exception as error:  # what was to be saved is lost: no clean stop
            self._report(error, "")
            return error
        if self.world.main:
            verdict.info("stopped after iteration %d; go on with the same command and --resume", self.iteration)
            by = self.signals.asked
            self._write("stopped", f"signal {stopped.number}" if by is None else f"asked for by {by}", note)
        return stopped

    def _rescue(self, error: BaseException, agreed: bool) -> str:
        """Save the last finished iteration if that is possible; a note on the result.

        `agreed`: every process does this now. Otherwise the first process saves alone: it has all weights unless they
        are split.
        """
        done, saver = self.iteration, self.saver
        if saver is not None and saver.writing and (agreed or self.world.main):
            if not agreed:
                ask_for_time()
            saver.settle(alone=not agreed)
        if isinstance(error, Overshot) and saver is not None:
            return self._set_aside(saver)
        if saver is None or done <= self.start or saver.attempted == done:
            return ""
        session = saver.session
        if not session.between_updates:
            return f"iteration {done + 1} failed in its update: the last checkpoint is the newest state"
        if agreed:
            saver.save()
        elif self.world.main and not is_split(session):
            ask_for_time()
            saver.save(alone=True)
        else:
            return ""
        return f"iteration {done} is saved"

    def _set_aside(self, saver: Saver) -> str:
        """Set aside the checkpoints of weights that overshot, so that a resumed run begins before them; a note."""
        done, session = self.iteration, saver.session
        # Updates with a bad gradient moved nothing: the weights are those before the first of them.
        back = math.ceil(session.parts.learner.bad_updates / session.config.optim.updates_per_iteration)
        bad = checkpoint.set_aside(self.folder.checkpoints, min(done, done + 1 - back)) if self.world.main else []
        aside = f"; the checkpoints of {', '.join(map(str, bad))} are set aside as diverged-..." if bad else ""
        left = checkpoint.available(self.folder.checkpoints)
        before = f"iteration {left[-1]}" if left else "the start"
        return f"the weights after iteration {done} are not saved{aside}; a resumed run goes on from {before}"

    def _shared(self, error: BaseException) -> bool:
        """True if all processes end with an error, or with its cause."""
        return any(each is not None and self.world.shares(each) for each in (error, error.__cause__))

    def _report(self, error: BaseException, note: str) -> None:
        """Write the failure to train.log, to summary.json and, if no other process prints it, to the terminal."""
        world, text = self.world, str(error) if isinstance(error, Fault) else described(error)
        if world.main:
            journal.error("%s", text)  # the command line prints what the first process leaves with
        elif not self._shared(error) and not (isinstance(error, Fault) and error.of_one_process):
            log.error("process %d: %s", world.rank, text)
        journal.debug("its traceback", exc_info=error)
        if not world.main:
            return
        if note:
            log.info("%s", note)
        status = error.status if isinstance(error, Fault) else Fault.status
        if isinstance(error, Moved):  # nothing is written there any more, and the message says how to go on
            return
        command = error.remedies[0].command if isinstance(error, Diverged) and error.remedies else resuming()
        if self.iteration:
            planned = self.planned
            verdict.info("%s after iteration %d of %d; go on with: %s", status, self.iteration, planned, command)
        try:
            self._write(status, text, note, command)
        except OSError as full:
            log.warning("%s cannot be written: %s", self.folder.path / SUMMARY, full)

    def _write(self, status: str, reason: str, note: str, command: str = "") -> None:
        """Add to `summary.json` how and where the run ended, and the command that resumes it."""
        known = known_object(self.folder.path / SUMMARY)
        if known.get("status") in ENDED:
            return  # the failure came after the end
        ended = {"status": status, "reason": reason, "iterations": self.iteration, "command": command or resuming()}
        ended |= {"saved": note} if note else {}
        self.folder.write_json(SUMMARY, known | ended | {"seconds": round(self.clock.seconds, 1)})
