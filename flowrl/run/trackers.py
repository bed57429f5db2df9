"""The trackers of a run: rows that a checkpoint holds, evaluations and the summary, sent from a thread for each.

A row is sent once a checkpoint holds it, so a run that was killed and goes on from its checkpoint repeats nothing that
was sent. `trackers.json` of the run folder holds the ids of the trackers' runs and the last iteration of each.
A tracker that fails is named once; the training does not wait for one, but for `_PATIENCE_S` at its end.
"""

import operator
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config.schema import RunConfig
from flowrl.config.trackers import Entry, require
from flowrl.core.errors import Moved, described
from flowrl.core.files import json_ready, read_object
from flowrl.core.strict import Options
from flowrl.display.console import journal, log
from flowrl.evaluation.results import Evaluation
from flowrl.media import media
from flowrl.run import tracker_runs
from flowrl.run.folder import RunFolder
from flowrl.run.tracker_runs import Mark

FILE = "trackers.json"
IMAGES = 8
"""Images of an evaluation that are sent: those of the first prompts at the first seed."""
_PATIENCE_S = 120.0
"""Seconds that the end of a run waits for a tracker that takes nothing any more."""
_HASTE_S = 5.0
"""The same after a failure or a signal: what is missing is sent when the run is resumed."""
_ROWS = 100
"""Rows that are sent between two notes of the progress."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a tracker is sent of an iteration."""

    iteration: int
    values: Mapping[str, float]
    images: Sequence[Path] = ()


class Marks:
    """`trackers.json`: name -> mark, written by the threads of the trackers."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._known: dict[str, Mark] = {}
        file = folder.path / FILE
        if file.is_file():
            told = read_object(file, "delete it: the trackers then begin new runs, with all rows of this one")
            self._known = {name: Mark(**mark) for name, mark in told.items()}

    def of(self, entry: Entry) -> Mark:
        run = secrets.token_hex(16)[: entry.kind.digits] or None
        return self._known.setdefault(entry.name, Mark(self.folder.path.name, run))

    def write(self) -> None:
        with self._lock, suppress(Moved):  # which ends the run by itself
            self.folder.write_json(FILE, {name: asdict(mark) for name, mark in self._known.items()})


class Line:
    """The way to one tracker: a queue, and a thread that starts the tracker when there is something to send."""

    def __init__(self, entry: Entry, marks: Marks, configuration: Options) -> None:
        self.entry, self.marks, self.configuration = entry, marks, configuration
        self.mark = marks.of(entry)
        self.queued = self.mark.sent
        """The last iteration that was put into the queue."""
        self.failed = False
        self._queue: queue.SimpleQueue[list[Step] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._moved = time.monotonic()

    def reopen(self, start: int) -> None:
        """Settle what an earlier call has sent, for a run that goes on after the iteration `start`."""
        mark, name = self.mark, self.entry.name
        folder = self.marks.folder.path / tracker_runs.FOLDER
        stands = tracker_runs.standing(self.entry, folder, mark.run) if mark.begun else None
        if stands is not None:
            mark.sent = stands
        elif self.entry.kind.replaces:
            mark.sent = min(mark.sent, start)
        elif mark.sending > mark.sent:
            log.warning(
                "%s: the run was killed while it sent iterations %d to %d; some may be missing there, and "
                "metrics.jsonl has all of them",
                *(name, mark.sent + 1, mark.sending),
            )
            mark.sent = mark.sending
        mark.sending = self.queued = mark.sent

    def put(self, steps: Sequence[Step]) -> None:
        """Send steps that were not sent yet, in order."""
        new = [step for step in steps if step.iteration > self.queued]
        if self.failed or not new:
            return
        self.queued = new[-1].iteration
        for place in range(0, len(new), _ROWS):
            self._queue.put(new[place : place + _ROWS])
        if self._thread is None:
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.entry.name}", daemon=True)
            self._thread.start()

    def close(self, patience_s: float, limit_s: float = float("inf")) -> None:
        """Wait until all is sent; give up if nothing moves for `patience_s` seconds, or after `limit_s`."""
        if self._thread is None:
            return
        self._queue.put(None)
        told, asked = False, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            now = time.monotonic()
            if not told and now - asked > 2:
                told = True
                log.info("waiting for %s to take the rest of the run", self.entry.name)
            if (now - max(asked, self._moved) > patience_s or now - asked > limit_s) and self._thread.is_alive():
                self.give_up(f"it has not taken the rest after {now - asked:.0f} s")
                return

    def give_up(self, reason: str) -> None:
        """Say once that the tracker misses the rest, and send it nothing more."""
        if not self.failed:
            self.failed = True
            log.warning(
                "tracker %s: %s. The training goes on without it; what is missing there, from iteration %d on, is in "
                "metrics.jsonl and is sent when the run is resumed",
                *(self.entry.name, reason, max(self.mark.sent + 1, 0)),
            )

    def _run(self) -> None:
        """The thread's work. Whatever a tracker raises, also at its exit, must not end a training."""
        try:
            tracker = None
            while (steps := self._queue.get()) is not None:
                tracker = tracker or self._start()
                self._send(tracker, steps)
            if tracker is not None:
                tracker.finish()
        except (Exception, SystemExit) as error:
            journal.debug("tracker %s", self.entry.name, exc_info=error)
            self.give_up(described(error))

    def _start(self) -> Any:
        mark, entry = self.mark, self.entry
        self.marks.write()  # its id, before there is a run of this id
        folder = self.marks.folder.path / tracker_runs.FOLDER
        tracker: Any = tracker_runs.make(entry, folder, mark, self.configuration)
        tracker.start()
        self._moved = time.monotonic()
        if not mark.begun:
            tracker.store_init_configuration(dict(self.configuration))
            if entry.kind.learned:
                mark.run = str(operator.attrgetter(entry.kind.learned)(tracker.tracker))
            mark.begun = True
            self.marks.write()
        return tracker

    def _send(self, tracker: Any, steps: Sequence[Step]) -> None:
        self.mark.sending = steps[-1].iteration
        self.marks.write()
        for step in steps:
            tracker_runs.log_images(self.entry, tracker, step.images, step.iteration)
            if step.values:
                # After the images; wandb keeps a row open for more of its step otherwise.
                commit = {"commit": True} if self.entry.name == "wandb" else {}
                tracker.log(dict(step.values), step=step.iteration, **commit)
            self._moved = time.monotonic()
        self.mark.sent = self.mark.sending
        self.marks.write()


class Trackers:
    """The trackers of a run, on its first process. Without trackers nothing is done, and no file is written."""

    def __init__(self, config: RunConfig, tree: Options, folder: RunFolder, *, main: bool = True) -> None:
        """Refuse what cannot be tracked. `tree` is the run's configuration with all defaults, which the trackers are
        told. `main`: False on all processes but the first, which send nothing. Raises ConfigError: a tracker that is
        not installed, or an option that it does not have.
        """
        self.folder, self.planned = folder, config.iterations
        self.lines: list[Line] = []
        self._rows: list[dict[str, Any]] = []
        entries = require(config.trackers)
        if entries and main:
            marks = Marks(folder)
            told = tracker_runs.flat({key: value for key, value in tree.items() if key != "trackers"})
            self.lines = [Line(entry, marks, told) for entry in entries]

    def open(self, start: int) -> None:
        """Go on after the iteration `start`, with the rows and evaluations that the run folder holds."""
        for line in self.lines:
            line.reopen(start)
        if self.lines:
            self._rows = self.folder.metrics.rows()
            self.send(start)

    def add(self, row: dict[str, Any]) -> None:
        """The row of a finished iteration, which is sent when a checkpoint holds it."""
        if self.lines:
            self._rows.append(json_ready(row))

    def send(self, saved: int) -> None:
        """Send the rows up to the iteration of a checkpoint, but for the newest: it may be sent with the summary."""
        rows = [row for row in self._rows[:-1] if row["iteration"] <= saved]
        self._rows = self._rows[len(rows) :]
        if rows or self.planned:
            self._put(lambda: map(self._step, rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the rest of a finished run, its result with the last row, and wait for the trackers."""
        last = int(self._rows[-1]["iteration"]) if self._rows else 0

        def rest() -> list[Step]:
            steps = {row["iteration"]: self._step(row) for row in self._rows}
            row = steps.get(last, Step(last, {}))
            values = {**row.values, **{f"summary/{k}": v for k, v in tracker_runs.numbers(summary).items()}}
            tuned, images = self._evaluation("tuned"), row.images
            if tuned is not None and tuned.iteration == last:  # else the guard has taken an earlier one
                values, images = values | _means(tuned), self._images("tuned") or images
            return [*steps.values(), Step(last, values, images)]

        self._put(rest)
        for line in self.lines:
            line.close(_PATIENCE_S)

    def leave(self, saved: int) -> None:
        """Send what the last checkpoint of a run that ends early holds, and wait a little."""
        if self._rows:
            self.send(saved)
        for line in self.lines:
            line.close(_HASTE_S, _HASTE_S)

    def _put(self, make: Callable[[], Iterable[Step]]) -> None:
        """Send steps, and the base's evaluation to those that miss it; a failure is none of the training."""
        waiting = [line for line in self.lines if not line.failed]
        if not waiting:
            return
        try:
            steps = {step.iteration: step for step in make()}
            if any(line.queued < 0 for line in waiting):  # the base's evaluation is iteration 0
                base = Step(0, _means(self._evaluation("base")), self._images("base"))
                steps = {0: base} | steps
            for line in waiting:
                line.put([step for step in steps.values() if step.values or step.images])
        except Exception as error:  # such as a damaged file of an evaluation
            for line in waiting:
                line.give_up(described(error))

    def _step(self, row: Mapping[str, Any]) -> Step:
        iteration = int(row["iteration"])
        values = {name: value for name, value in tracker_runs.numbers(row).items() if name != "iteration"}
        return Step(iteration, values, self._images(f"iteration-{iteration:06d}"))

    def _evaluation(self, tag: str) -> Evaluation | None:
        file = self.folder.path / "eval" / f"{tag}.json"
        return Evaluation.load(file) if file.is_file() else None

    def _images(self, tag: str) -> list[Path]:
        folder = self.folder.path / "eval" / tag
        found = [media.find(folder / f"{prompt:05d}-0") for prompt in range(IMAGES)]
        return [file for file in found if file is not None]


def _means(evaluation: Evaluation | None) -> dict[str, float]:
    """Means of an evaluation, named as those of a row."""
    scores = {} if evaluation is None else evaluation.scores
    some = {name: table[np.isfinite(table)] for name, table in scores.items()}
    return {f"eval/{name}": float(values.mean()) for name, values in some.items() if values.size}
