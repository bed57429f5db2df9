"""`adapter/` of a run folder: the trained weights in the layout of a plain pipeline, and their iteration.

It is written after its checkpoint, so a kill or a full disk in between leaves an older one or a torn one. `flowrl.json`
next to the weights is their stamp: it is removed before their first byte, written after their last, and holds their
iteration. Weights without a stamp, or with that of another iteration, are written again from the checkpoint.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.core.files import fsync, fsync_all, known_object, write_atomically, writing
from flowrl.core.strict import Options
from flowrl.display.console import log
from flowrl.models.weights.roles import Weights
from flowrl.run import checkpoint
from flowrl.run.folder import RunFolder
from flowrl.run.status import GUARDED

FOLDER, STAMP = "adapter", "flowrl.json"


def write(run: Path, iteration: int, save: Callable[[Path], object]) -> None:
    """Write the weights of an iteration by `save(folder)`.

    Raises WriteError: the disk is full or not writable; the folder has no stamp then.
    """
    with writing(run / FOLDER, f"the checkpoint of iteration {iteration} is safe"):
        begin(run)
        save(run / FOLDER)
        complete(run, iteration)


def begin(run: Path) -> None:
    """Remove the stamp: from here on the weights count as torn. A run folder that is gone is not made again."""
    forget(run)
    (run / FOLDER).mkdir(exist_ok=True)


def forget(run: Path) -> None:
    """Remove the stamp, if there is one."""
    if (run / FOLDER / STAMP).exists():
        (run / FOLDER / STAMP).unlink()
        fsync(run / FOLDER)  # before the first byte: a power cut must not keep the stamp of torn weights


def complete(run: Path, iteration: int) -> None:
    """Wait until the weights are on the disk, then stamp them."""
    fsync_all(run / FOLDER)
    stamp(run, iteration)


def stamp(run: Path, iteration: int, guard: dict[str, Any] | None = None) -> None:
    """Record the iteration of the weights, which are complete; and what the guard that chose them says."""
    facts = {"iteration": iteration} | ({} if guard is None else {"status": GUARDED, "guard": guard})
    write_atomically(run / FOLDER / STAMP, json.dumps(facts) + "\n")


def chosen(run: Path) -> int | None:
    """The iteration whose weights are the run's result: the newest checkpoint's, or the one that its guard took.

    None: there is no checkpoint.
    """
    saved = checkpoint.available(run / "checkpoints")
    if not saved:
        return None
    try:
        facts = known_object(run / FOLDER / STAMP)
        if facts["guard"]["ended"] == saved[-1] and facts["iteration"] in saved:
            return int(facts["iteration"])
    except (ValueError, KeyError, TypeError):  # no guard chose
        pass
    return saved[-1]


def outdated(run: Path) -> int | None:
    """The iteration of the result (`chosen`), if the weights are torn, of another one, or without a stamp.

    Runs of the first versions have no stamp; their weights are written once more, from the same checkpoint.
    """
    wanted = chosen(run)
    stamped = known_object(run / FOLDER / STAMP).get("iteration")
    return None if stamped == wanted else wanted


def announce(run: Path, iteration: int) -> None:
    """Warn that the weights are about to be written again."""
    log.warning("%s is not that of the checkpoint of iteration %d; it is written again", run / FOLDER, iteration)


def renew(run: Path, iteration: int, tree: Options, adapter: Any, options: Any) -> None:
    """Write the weights of the checkpoint of an iteration; `adapter` is the untrained model, whose network is changed.

    Raises CheckpointError: the checkpoint is damaged; ConfigError: the run is under way, or cannot be written.
    """
    announce(run, iteration)
    result, folder = checkpoint.load(run / "checkpoints", iteration), RunFolder(run)
    weights = Weights(adapter.network, options.lora, adapter.lora_targets, 0)
    prefix = "weights/"
    weights.load_state({k.removeprefix(prefix): v for k, v in result.tensors.items() if k.startswith(prefix)})
    folder.lock()
    try:
        with weights.using("policy" if tree["optim"]["ema"] is None else "ema"):
            write(run, iteration, lambda place: weights.save(place, type(adapter.pipeline)))
    finally:
        folder.unlock()
