"""A run's state: into a checkpoint and back, and beside it the weights as a plain pipeline loads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl import checkpoint, handover
from flowrl.checkpoint import Checkpoint, Rows
from flowrl.errors import Elsewhere, UnwritableCheckpoint
from flowrl.files import writing
from flowrl.metrics import log
from flowrl.runs import BATCHES, differences, versions
from flowrl.sharding import rows

if TYPE_CHECKING:
    from flowrl.trainer import Trainer


_ALGORITHM = "algorithm/"


def plain(trainer: Trainer) -> dict[str, Any]:
    """What the parts of a run remember beside their tensors, as it is now."""
    parts = {"algorithm": trainer.algorithm, "source": trainer.source, "collector": trainer.collector}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def is_split(trainer: Trainer) -> bool:
    """Whether no process has all of the trained weights."""
    return bool(rows(trainer.weights))


def save(trainer: Trainer, iteration: int, *, alone: bool = False) -> None:
    """Checkpoint the end of an iteration, with the weights as a plain pipeline loads them.

    Args:
        trainer: of the run; what its parts remember is that of `trainer.plain`.
        iteration: the last finished one.
        alone: the other processes have no part in it, as they may be gone.

    Raises:
        UnwritableCheckpoint: on every process, if it could not be written on one.
        WriteError: the checkpoint is there, and its adapter could not be written.
    """
    if trainer.saved == iteration:
        return
    trainer.attempted = iteration
    world, weights = trainer.world, trainer.weights
    moments, counters = trainer.optimizer.state()
    tensors = {f"weights/{k}": v for k, v in weights.state().items()}
    tensors |= {f"optim/{k}": v for k, v in moments.items()}
    tensors |= {f"{_ALGORITHM}{k}": v for k, v in trainer.algorithm.tensors().items()}
    state = {
        "optimizer": counters,
        **trainer.plain,
        "due": trainer.due,
        "seconds": trainer.seconds,
        "processes": world.size,
        "versions": versions(),
        "config": trainer.resolved.tree(),
    }
    own = rows(weights)
    split = [name for name, value in tensors.items() if own and value.ndim and not name.startswith(_ALGORITHM)]
    places = {name: own[_parameter(name)] for name in split}
    saved, keep = Checkpoint(iteration, tensors, state, places), trainer.config.checkpoint.keep
    try:
        if own and not alone:
            checkpoint.save(trainer.folder.checkpoints, saved, keep, world)
        else:
            _first(trainer, lambda: checkpoint.save(trainer.folder.checkpoints, saved, keep), alone=alone)
        write_adapter(trainer, trainer.folder.path, iteration, alone=alone)
    except Elsewhere as error:
        raise UnwritableCheckpoint(str(error)) from error
    trainer.saved = iteration


def _first(trainer: Trainer, work: Callable[[], Any], *, alone: bool) -> None:
    """Do something on the first process, while the others wait for what came of it unless it is `alone`."""
    if alone:
        work()
    else:
        trainer.world.together(lambda: work() if trainer.world.main else None)


def write_adapter(trainer: Trainer, run: Path, iteration: int, *, alone: bool = False) -> None:
    """The trained weights as a plain pipeline loads them, then of which iteration they are; see `save`."""
    weights, folder = trainer.weights, run / handover.FOLDER

    def write(work: Callable[[], Any]) -> None:
        with writing(folder, f"the checkpoint of iteration {iteration} is safe"):
            _first(trainer, work, alone=alone)

    with weights.using(trainer.optimizer.role):
        if rows(weights):  # the folders of the denoisers, as `Weights.save` writes them, from the rows of all
            for name in weights.components:
                network = weights.whole(name, keep=trainer.world.main)
                write(lambda n=network, name=name: n.save_pretrained(folder / name))
        else:
            write(lambda: weights.save(folder, type(trainer.adapter.pipeline)))
    write(lambda: checkpoint.fsync_all(folder))
    write(lambda: handover.stamp(run, iteration))


def mend_adapter(trainer: Trainer, run: Path) -> None:
    """Write the weights, which are those of the newest checkpoint, where the run folder has older ones."""
    iteration = trainer.world.gather(handover.outdated(run))[0]
    if iteration is not None:
        handover.tell(run, iteration)
        write_adapter(trainer, run, iteration)


def load(trainer: Trainer, folder: Path, iteration: int, accept_changes: bool = False) -> dict[str, Any]:
    """Put a checkpoint's tensors, counters and method back, whatever number of processes wrote it; its plain data.

    `accept_changes` takes another set of given pictures than the checkpoint's.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
        ModelError: it is of another model.
    """
    own, world = rows(trainer.weights), trainer.world

    def wanted(name: str) -> Rows | None:
        return None if name.startswith(_ALGORITHM) else own.get(_parameter(name))

    # Every process reads the rows it needs; the hashes of large files are shared out.
    part = slice(world.rank, None, world.size) if own else slice(None)
    found: list[Checkpoint] = []
    trainer.agree(lambda: found.append(checkpoint.load(folder, iteration, wanted, part)))
    split: dict[str, dict[str, Any]] = {"weights": {}, "optim": {}, "algorithm": {}}
    for name, value in found[0].tensors.items():
        section, _, rest = name.partition("/")
        split[section][rest] = value
    trainer.weights.load_state(split["weights"])
    trainer.optimizer.load_state(split["optim"], found[0].state["optimizer"])
    trainer.algorithm.load_state_dict(found[0].state["algorithm"])
    if split["algorithm"]:
        trainer.algorithm.load_tensors(split["algorithm"])
    if not (accept_changes and trainer.resolved.run.data.pairs is not None):
        trainer.source.load_state_dict(found[0].state["source"])  # of given pictures it only says which set they are
    trainer.collector.load_state_dict(found[0].state["collector"])
    trainer.iteration = iteration
    return found[0].state


def _parameter(name: str) -> str:
    """That a tensor belongs to: weights/ROLE/PARAMETER or optim/PARAMETER/MOMENT.

    >>> _parameter("weights/ema/proj.weight"), _parameter("optim/proj.weight/exp_avg")
    ('proj.weight', 'proj.weight')
    """
    section, first, second = name.split("/")
    return second if section == "weights" else first


def restore(trainer: Trainer, iteration: int, accept_changes: bool = False) -> None:
    """Go on from the run's own checkpoint."""
    state, world = load(trainer, trainer.folder.checkpoints, iteration, accept_changes), trainer.world
    trainer.seconds_before, trainer.saved = state["seconds"], iteration
    trainer.due = state.get("due")
    if world.main:
        # Its row may stand there already, if the call that made its evaluation was killed at once.
        trainer.folder.forget_after(iteration if trainer.due is None else iteration - 1)
    world.barrier()
    log.info("resumed after iteration %d", iteration)
    mend_adapter(trainer, trainer.folder.path)
    if state["processes"] != world.size:
        log.warning(
            "%d processes before, %d now: the result is right but not bitwise the same", state["processes"], world.size
        )
    other = [text for text in differences(state["config"], trainer.resolved.tree(), ()) if text.startswith(BATCHES)]
    if other:
        log.warning("%s: the result is right but not bitwise the same", "; ".join(other))
    changed = {k: v for k, v in state["versions"].items() if versions().get(k) != v}
    if changed:
        log.warning("other versions than before (%s): the result may differ in the last digits", changed)
