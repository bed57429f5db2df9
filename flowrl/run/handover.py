"""`adapter/` of a run folder: the trained weights in the layout of a plain pipeline, and their iteration.

It is written after its checkpoint, so a kill or a full disk in between leaves an older one. `flowrl.json` next to the
weights is written last and holds their iteration; if a checkpoint is newer, the weights are written again from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.core.console import log
from flowrl.core.files import write_atomically, writing
from flowrl.core.status import GUARDED
from flowrl.core.strict import Options
from flowrl.models.weights import Weights
from flowrl.run import checkpoint
from flowrl.run.folder import RunFolder

FOLDER, STAMP = "adapter", "flowrl.json"


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
        facts = json.loads((run / FOLDER / STAMP).read_text(encoding="utf-8"))
        if facts["guard"]["ended"] == saved[-1] and facts["iteration"] in saved:
            return int(facts["iteration"])
    except (OSError, ValueError, KeyError, TypeError):  # no guard chose
        pass
    return saved[-1]


def outdated(run: Path) -> int | None:
    """The iteration of the result (`chosen`), if the weights are of another one."""
    wanted = chosen(run)
    if wanted is None:
        return None
    try:
        current = json.loads((run / FOLDER / STAMP).read_text(encoding="utf-8"))["iteration"] == wanted
    except (OSError, ValueError, KeyError, TypeError):  # a run of an older version has none
        current = _written(run / FOLDER) >= _written(checkpoint.path_of(run / "checkpoints", wanted))
    return None if current else wanted


def _written(folder: Path) -> float:
    """Time of the last change of its files, in s; 0 without a folder."""
    return max((file.stat().st_mtime for file in folder.rglob("*") if file.is_file()), default=0.0)


def announce(run: Path, iteration: int) -> None:
    """Warn that the weights are about to be written again."""
    log.warning("%s is older than the checkpoint of iteration %d; it is written again", run / FOLDER, iteration)


def renew(run: Path, iteration: int, tree: Options, adapter: Any, options: Any) -> None:
    """Write the weights of the checkpoint of an iteration.

    Args:
        run: the run folder.
        iteration: of the checkpoint.
        tree: the run's configuration.
        adapter: its untrained model, whose network is changed.
        options: of the model.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: the run is under way, or cannot be written.
    """
    announce(run, iteration)
    result, folder = checkpoint.load(run / "checkpoints", iteration), RunFolder(run)
    weights = Weights(adapter.network, options.lora, adapter.lora_targets, 0)
    prefix = "weights/"
    weights.load_state({k.removeprefix(prefix): v for k, v in result.tensors.items() if k.startswith(prefix)})
    folder.lock()
    try:
        with (
            weights.using("policy" if tree["optim"]["ema"] is None else "ema"),
            writing(run / FOLDER, f"the checkpoint of iteration {iteration} is safe"),
        ):
            weights.save(run / FOLDER, type(adapter.pipeline))
            stamp(run, iteration)
    finally:
        folder.unlock()
