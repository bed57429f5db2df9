"""Seconds of an iteration by measured forwards on named cards: `measured.json`, by `python -m scripts.pages hours`.

    forward row   f = ms of a forward of the rollout / its rows; under CFG a sample has two
    trained row   t = (ms of a training forward - its frozen rows f) / its trained rows, backward pass included
    iteration     rollout rows f + trained rows (t + frozen forwards f) + updates x ms of an optimizer step
                  + t for each row of `data.anchor`

A measurement counts for runs of the same `setting` alone. Gradient checkpointing repeats a forward, f a trained row.
"""

import json
from pathlib import Path
from typing import Any

from flowrl.config.resolved import Resolved
from flowrl.planning.memory import Estimate, count

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("measured.json").read_text("ascii"))
"""`cards`: GiB of each measured card; `rows`: the measurements."""
LEFT_OUT = "rewards, decoding and encoding, evaluations and checkpoints"
"""What the measured forwards are without."""


def setting(resolved: Resolved, adapter: Any) -> dict[str, Any]:
    """What the time of a row depends on, plain data; the adapter is a fresh one on the meta device."""
    config = resolved.model.config
    native = config.lora is not None and config.dtype != "float32"
    return {
        "family": resolved.model.name,
        "parameters": count(adapter.network),
        "pixels": [adapter.height, adapter.width, adapter.num_frames],
        "embeddings": {name: list(shape) for name, shape in adapter.condition_shapes().items()},
        "precision": [config.dtype, config.precision or ("native" if native else "autocast"), config.memory.few_bits],
        "lora": None if config.lora is None else config.lora.kind,
        "others": [config.compile, config.attention, config.guidance_gradient],
    }


def frozen_forwards(method: Any) -> int:
    """Forwards without gradient with each one of an update: frozen roles, recomputed log-probs, the means of a loss."""
    extra = method.frozen + method.recompute
    return extra + (extra + 1) * method.centres


def seconds(
    card: str, resolved: Resolved, adapter: Any, result: Estimate, own: dict[str, Any], *, recomputes: bool = False
) -> tuple[float, float | None, str] | None:
    """(seconds of an iteration's rollout, of its updates, by which measurement) of a run on a card; None: none.

    `own`: the run's `setting`. `recomputes`: what `model.gradient_checkpointing: auto` decides there.
    """
    run, method, guidance = resolved.run, resolved.method, resolved.run.rollout.guidance_scale
    row = next((row for row in TABLE["rows"] if row["card"] == card and row["setting"] == own), None)
    if row is None:
        return None
    forward, took, update = row["forward"]["ms"] / row["forward"]["rows"], row["update"], None
    smaller = min(run.rollout.batch_size, run.optim.batch_size) < row["batch"]
    note = f"measured at batch {row['batch']}" + (", and this smaller one takes longer" if smaller else "")
    if took is not None:
        trained = (took["ms"] - (took["rows"] - took["trained_rows"]) * forward) / took["trained_rows"]
        every = resolved.model.config.gradient_checkpointing
        every = recomputes if every == "auto" else every
        each = trained + ((1 / int(every) if every else 0) - took["recomputes"]) * forward
        branches, fitting = adapter.branches(resolved.training.guidance(adapter, guidance)), resolved.fitting
        all_rows = result.rows[1] * branches * (each + frozen_forwards(method) * forward)
        if fitting is not None:
            all_rows += result.rows[2] * adapter.branches(fitting.guidance(adapter, guidance)) * each
        steps = run.optim.updates_per_iteration * method.passes * (took["step_ms"] or 0.0)
        update = (all_rows + steps) / 1000
        note += (", recomputing" if every else "") + (", without optimizer steps" if took["step_ms"] is None else "")
    return result.rows[0] * adapter.branches(guidance) * forward / 1000, update, note
