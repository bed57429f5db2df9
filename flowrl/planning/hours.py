"""Seconds of an iteration by measurements of forwards on named cards, `measured.json` (`python -m scripts.pages hours`).

    forward row   f = ms of a forward of the rollout / its rows; CFG has two rows a sample
    trained row   t = (ms of a training forward - frozen rows f) / trained rows, its backward pass included
    iteration     rollout rows f + trained rows (t + frozen forwards f) + updates x ms of an optimizer step

A measurement counts for a run of the same `setting` alone. Gradient checkpointing repeats a forward: f more a trained
row. Not in it: rewards, decoding, encoding, evaluations, checkpoints, and other processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.config.resolved import Resolved
from flowrl.planning.memory import Estimate, count

FILE = Path(__file__).with_name("measured.json")
LEFT_OUT = "rewards, decoding and encoding, evaluations and checkpoints"
"""What no measurement of forwards has."""


def setting(resolved: Resolved, adapter: Any) -> dict[str, Any]:
    """What the time of a row depends on, plain data: family, size, pixels, length of the texts, arithmetic.

    `adapter`: a fresh one on the meta device.
    """
    config = resolved.model.config
    return {
        "family": resolved.model.name,
        "parameters": count(adapter.network),
        "pixels": [adapter.height, adapter.width, adapter.num_frames],
        "embeddings": {name: list(shape) for name, shape in adapter.condition_shapes().items()},
        "dtype": config.dtype,
        "precision": config.precision or ("native" if config.lora and config.dtype != "float32" else "autocast"),
        "lora": None if config.lora is None else config.lora.kind,
        "compile": config.compile,
        "attention": config.attention,
        "guidance_gradient": config.guidance_gradient,
        "few_bits": config.memory.few_bits,
    }


def frozen_forwards(method: Any) -> int:
    """Forwards without gradient that come with each forward of an update.

    Those of frozen roles and recomputed log-probs; the means of a loss take a pass of their own, of these and the policy.
    """
    extra = method.frozen + method.recompute
    return extra + (extra + 1) * method.centres


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of an iteration on one process of a card."""

    rollout: float | None
    """None: not measured; so is `update`."""
    update: float | None
    note: str
    """By which measurement."""

    @property
    def whole(self) -> float | None:
        """Both parts, where they are known."""
        return None if self.rollout is None or self.update is None else self.rollout + self.update


def cards() -> dict[str, int]:
    """Measured card -> its memory in bytes."""
    return {card: int(gib * 2**30) for card, gib in _table()["cards"].items()}


@cache
def _table() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def seconds(
    card: str, resolved: Resolved, adapter: Any, result: Estimate, own: dict[str, Any], *, recomputes: bool = False
) -> Seconds:
    """The seconds of an iteration on a measured card.

    Args:
        card: one of `cards`.
        resolved: the run.
        adapter: its own, on the meta device.
        result: its estimate, with the rows of its forwards.
        own: its `setting`.
        recomputes: what `model.gradient_checkpointing: auto` decides there.
    """
    config = resolved.run
    row = next((row for row in _table()["rows"] if row["card"] == card and row["setting"] == own), None)
    if row is None:
        return Seconds(None, None, "no measurement of this model at this size and precision")
    forward = row["forward"]["ms"] / row["forward"]["rows"]
    rollout = result.sampled * adapter.branches(config.rollout.guidance_scale) * forward / 1000
    update, smaller = None, config.rollout.batch_size < row["batch"] or config.optim.batch_size < row["batch"]
    note = f"measured at batch {row['batch']}" + (", and smaller ones take longer" if smaller else "")
    took, every = row["update"], resolved.model.config.gradient_checkpointing
    if took is not None:
        trained = (took["ms"] - (took["rows"] - took["trained_rows"]) * forward) / took["trained_rows"]
        every = recomputes if every == "auto" else every
        again = (1 / int(every) if every else 0.0) - took["recomputes"]
        each = trained + (again + frozen_forwards(resolved.method)) * forward
        branches = adapter.branches(resolved.training.guidance(adapter, config.rollout.guidance_scale))
        steps = config.optim.updates_per_iteration * resolved.method.passes * (took["step_ms"] or 0.0)
        update = (result.trained_on * branches * each + steps) / 1000
        note += ", without optimizer steps" if took["step_ms"] is None else ""
        note += ", recomputing" if every else ""
    return Seconds(rollout, update, note)
