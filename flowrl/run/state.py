"""A run's checkpoints: the state of its session, and the weights in the layout of a plain pipeline."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.core.background import Background
from flowrl.core.errors import ConfigError, Elsewhere, UnwritableCheckpoint
from flowrl.core.files import writing
from flowrl.core.versions import versions
from flowrl.display import display
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.run import checkpoint, handover, inputs
from flowrl.run.changes import BATCHES, differences
from flowrl.run.checkpoint import Checkpoint
from flowrl.run.folder import RunFolder
from flowrl.run.session import Session
from flowrl.training.sharding import Rows, rows
from flowrl.training.world import ALONE, World

_WHOLE = ("algorithm/", "judges/")
"""Tensors that every process has whole."""
_LARGE = 2**30
"""Bytes from which the checkpoint of full weights is written in a thread, while the run goes on."""


class Clock:
    """Seconds that a run has taken, with those before it was resumed."""

    def __init__(self) -> None:
        self.before, self.started = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started


class Saver:
    """Saves a session in the folder of its run, and restores it from there."""

    def __init__(self, session: Session, folder: RunFolder, clock: Clock) -> None:
        self.session, self.folder, self.clock = session, folder, clock
        self.saved = self.attempted = -1
        """The last iteration with a checkpoint, and the last one for which a checkpoint was begun."""
        self.due: dict[str, Any] | None = None
        """Row of the last finished iteration, until it and its evaluation are written; else None."""
        self.guard: dict[str, Any] | None = None
        """State of the guard, plain data; None without one."""
        self.spared: tuple[int, ...] = ()
        """Iterations whose checkpoints are kept whatever `checkpoint.keep` says."""
        self._pending: int | None = None
        """Iteration whose checkpoint a thread of the first process writes; None: there is none."""
        self._thread: Background | None = None

    def save(self, *, alone: bool = False, wait: bool = True) -> None:
        """Save the end of the last finished iteration: a checkpoint, and the weights for a plain pipeline.

        `alone`: without the other processes, which may be gone. `wait` False returns as soon as a large state is copied
        to host memory; `settle` waits until it is written.

        Raises UnwritableCheckpoint: on every process, if it could not be written on one; WriteError: the checkpoint is
        written, and its adapter could not be.
        """
        self.settle(alone=alone)
        if self.saved != self.session.iteration:
            with working(f"writing the checkpoint of iteration {self.session.iteration}"):
                self._save(alone=alone, wait=wait)

    def _save(self, *, alone: bool, wait: bool) -> None:
        session, iteration = self.session, self.session.iteration
        self.attempted = iteration
        _first(session, self.folder.require_own, alone=alone)
        tensors, plain = session.state()
        plain |= {
            "due": self.due,
            "guard": self.guard,
            "bad_updates": session.parts.learner.bad_updates,
            "seconds": self.clock.seconds,
            "processes": session.world.size,
            "versions": versions(),
            "config": session.resolved.tree(),
        }
        own = rows(session.weights)
        large = not own and session.weights.lora is None and sum(v.nbytes for v in tensors.values()) >= _LARGE
        split = [name for name, value in tensors.items() if own and value.ndim and not name.startswith(_WHOLE)]
        places = {name: own[_parameter(name)] for name in split}
        saved = Checkpoint(iteration, tensors, plain, places)
        try:
            if large and not (wait or alone):
                _first(session, lambda: self._begin(saved), alone=False)
                self._pending = iteration
                return
            if own and not alone:
                self._write(saved, session.world)
            else:
                _first(session, lambda: self._write(saved), alone=alone)
            write_adapter(session, self.folder.path, alone=alone)
        except Elsewhere as error:
            raise UnwritableCheckpoint(str(error)) from error
        self._note(iteration)

    def _note(self, iteration: int) -> None:
        self.saved = iteration
        folder = checkpoint.path_of(self.folder.checkpoints, iteration)
        display.current().send("saved", iteration=iteration, folder=str(folder))

    def _write(self, saved: Checkpoint, world: World = ALONE) -> None:
        keep = self.session.config.checkpoint.keep
        checkpoint.save(self.folder.checkpoints, saved, keep, world, self.spared)

    def _begin(self, live: Checkpoint) -> None:
        """Copy a state to host memory, and write it in a thread."""
        weights, run, iteration = self.session.weights, self.folder.path, live.iteration
        tensors = {name: value.to("cpu", copy=True) for name, value in live.tensors.items()}
        prefix = f"weights/{self.session.optimizer.role}/"
        values = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        networks = {name: weights.whole(name, keep=True, values=values) for name in weights.components}
        folder, keep, spared = self.folder.checkpoints, self.session.config.checkpoint.keep, self.spared

        def work() -> None:
            checkpoint.save(folder, replace(live, tensors=tensors), keep, spared=spared)
            handover.write(run, iteration, lambda place: [n.save_pretrained(place / k) for k, n in networks.items()])

        self._thread = Background(work)

    @property
    def writing(self) -> bool:
        """A thread of the first process writes a checkpoint, or has ended and was not waited for."""
        return self._pending is not None

    def settle(self, *, alone: bool = False, only_done: bool = False) -> None:
        """Wait until the checkpoint that a thread writes is in place, if there is one. `alone`: without the other
        processes; `only_done`: do not wait for a thread that is still at work. Raises UnwritableCheckpoint, WriteError:
        as `save` would have.
        """
        thread, world = self._thread, self.session.world
        if self._pending is None or (only_done and not world.any(thread is not None and thread.ended.is_set())):
            return
        iteration, self._pending, self._thread = self._pending, None, None
        try:
            with working(f"writing the checkpoint of iteration {iteration}"):
                _first(self.session, lambda: None if thread is None else thread.result(), alone=alone)
        except Elsewhere as error:
            raise UnwritableCheckpoint(str(error)) from error
        self._note(iteration)

    def restore(self, iteration: int, accept_changes: bool = False) -> None:
        """Resume from the run's own checkpoint."""
        session, folder = self.session, self.folder
        with working("reading the checkpoint"):
            state = load(session, folder.checkpoints, iteration, accept_changes)
        world = session.world
        self.clock.before, self.saved = state["seconds"], iteration
        self.due, self.guard = state["due"], state["guard"]
        session.parts.learner.bad_updates = state["bad_updates"]
        if world.main:
            # Its row may be there already, if the call that made its evaluation was killed at once.
            folder.forget_after(iteration if self.due is None else iteration - 1)
        world.barrier()
        log.info("resumed after iteration %d", iteration)
        mend_adapter(session, folder.path)
        stretched = _stretched(state, session)
        if world.main and stretched:
            inputs.note(folder.path, iteration, stretched)
        for text in (*_unlike(state, session), *stretched):
            log.warning("%s", text)


def _unlike(state: dict[str, Any], session: Session) -> list[str]:
    """Differences from the earlier call that may change the numbers, in words."""
    result, size = [], session.world.size
    if state["processes"] != size:
        result.append(
            f"{state['processes']} processes before, {size} now: the result is right but not bitwise the same"
        )
    found = differences(state["config"], session.resolved.tree(), ())
    other = [text for key, text in found.items() if key.startswith(BATCHES)]
    if other:
        result.append(f"{'; '.join(other)}: the result is right but not bitwise the same")
    changed = {k: v for k, v in state["versions"].items() if versions().get(k) != v}
    if changed:
        result.append(f"other versions than before ({changed}): the result may differ in the last digits")
    return result


def _stretched(state: dict[str, Any], session: Session) -> list[str]:
    """The jump of a learning rate whose schedule has another length than in the earlier call, in words."""
    optimizer, optim = session.optimizer, session.config.optim
    before, now = state["config"]["iterations"], session.config.iterations
    if before == now or optim.schedule == "constant" or not optimizer.updates:
        return []
    then = {key: state["config"]["optim"][key] for key in ("learning_rate", "warmup_updates", "schedule")}
    last = replace(optim, **then).rate(optimizer.updates - 1, optimizer.total_updates * before // now)
    return [
        f"iterations was {before}, now {now}, and optim.schedule={optim.schedule} spans all of them: the learning rate "
        f"was {last:.3g} in the last update and is {optimizer.learning_rate():.3g} in the next one; --accept-changes "
        "takes optim.learning_rate and optim.schedule (docs/configuration.md)"
    ]


def is_split(session: Session) -> bool:
    """True if no process has all of the trained weights."""
    return bool(rows(session.weights))


def _first(session: Session, work: Callable[[], Any], *, alone: bool) -> None:
    """Do something on the first process, while the others wait for its result unless it is `alone`."""
    if alone:
        work()
    else:
        session.world.together(lambda: work() if session.world.main else None)


def write_adapter(session: Session, run: Path, *, alone: bool = False) -> None:
    """Write the trained weights in the layout of a plain pipeline, then their iteration; see `Saver.save`."""
    weights, folder, iteration = session.weights, run / handover.FOLDER, session.iteration

    def first(work: Callable[[], Any]) -> None:
        with writing(folder, f"the checkpoint of iteration {iteration} is safe"):
            _first(session, work, alone=alone)

    with weights.using(session.optimizer.role):
        if not rows(weights):
            first(lambda: handover.write(run, iteration, lambda to: weights.save(to, type(session.model.pipeline))))
            return
        first(lambda: handover.begin(run))
        for name in weights.components:  # as `Weights.save` writes them, from the rows of all processes
            network = weights.whole(name, keep=session.world.main)
            first(lambda n=network, name=name: n.save_pretrained(folder / name))
    first(lambda: handover.complete(run, iteration))


def mend_adapter(session: Session, run: Path) -> None:
    """Write the session's weights, those of the newest checkpoint, if the run folder has others or torn ones."""
    iteration = session.world.gather(handover.outdated(run))[0]
    if iteration is not None:
        handover.announce(run, iteration)
        write_adapter(session, run)


def load(session: Session, folder: Path, iteration: int, accept_changes: bool = False) -> dict[str, Any]:
    """Restore a checkpoint, whatever number of processes wrote it; its plain data.

    `accept_changes` accepts another set of given images than the checkpoint's.

    Raises CheckpointError: a file is missing, truncated or changed; ModelError: it is of another model.
    """
    found = read(session, folder, iteration)
    session.load_state(iteration, found.tensors, found.state, other_data=accept_changes)
    return found.state


def read(session: Session, folder: Path, iteration: int) -> Checkpoint:
    """A checkpoint with this process's part of its tensors. Raises CheckpointError: as of `load`."""
    own, world = rows(session.weights), session.world

    def wanted(name: str) -> Rows | None:
        return None if name.startswith(_WHOLE) else own.get(_parameter(name))

    # Every process reads the rows it needs; the hashes of large files are shared out.
    part = slice(world.rank, None, world.size) if own else slice(None)
    result: list[Checkpoint] = []
    world.agree(lambda: result.append(checkpoint.load(folder, iteration, wanted, part)))
    return result[0]


def load_newest(session: Session, run: Path, accept_changes: bool = False) -> None:
    """Load the newest checkpoint of a run folder, or the one its guard took, into a session of another folder.

    Raises ConfigError: it has none.
    """
    iteration = handover.chosen(run)
    if iteration is None:
        raise ConfigError(f"{run} holds no checkpoint to evaluate")
    load(session, run / "checkpoints", iteration, accept_changes)
    owner = RunFolder(run)  # a run under way writes its adapter itself
    if session.world.gather(session.world.main and owner.try_lock())[0]:
        mend_adapter(session, run)
    owner.unlock()


def _parameter(name: str) -> str:
    """The parameter of a tensor that is named weights/ROLE/PARAMETER or optim/PARAMETER/MOMENT.

    >>> _parameter("weights/ema/proj.weight"), _parameter("optim/proj.weight/exp_avg")
    ('proj.weight', 'proj.weight')
    """
    section, first, second = name.split("/")
    return second if section == "weights" else first
