"""Operations of the network for one row, counted on tensors without values: the useful work of a run's forwards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.resolved import Resolved
from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.models.base import ModelAdapter
from flowrl.models.generic.outline import Unmeasurable
from flowrl.models.weights.roles import trainable
from flowrl.planning.memory import UnknownModel, skeleton
from flowrl.planning.meter import faked, measured
from flowrl.rollout.policy import Evaluations


@dataclass(frozen=True, slots=True)
class RowFlop:
    """Floating-point operations of one row through the network; a multiply-add counts as 2."""

    forward: float
    backward: float
    """Of its backward pass; nothing is counted twice where gradient checkpointing repeats a forward."""

    def of(self, rows: int, with_gradient: int) -> float:
        """Operations of `rows` forwards, `with_gradient` of which have a backward pass."""
        return rows * self.forward + with_gradient * self.backward


def row_flop(resolved: Resolved, cond: Condition, unconditional: Condition | None) -> RowFlop | None:
    """Operations of one row of the run's forwards; None where its model cannot be measured without weights.

    Args:
        resolved: the run.
        cond: conditions of prompts, whose shapes are taken; of texts with lengths of their own the middle one.
        unconditional: the embedding that guidance leads away from, one row; None: there is none.
    """
    # What computes the same in another way is left out: it must not count as useful.
    config = resolved.model.config
    # All branches of guidance have a gradient, so that each row is counted alike; how many had one is counted in a run.
    plain = {"gradient_checkpointing": False, "guidance_gradient": "both", "compile": None}
    config = dataclasses.replace(config, memory=type(config.memory)(), init_lora=None, **plain)
    model = dataclasses.replace(resolved.model, config=config)
    frozen = resolved.training.frozen
    try:
        adapter: ModelAdapter = skeleton(dataclasses.replace(resolved, model=model))
        with torch.device("meta"):
            if not frozen:
                trainable(adapter, config, 0)
        with faked(adapter.network):
            return _measured(adapter, resolved, _one(cond), unconditional, frozen=frozen)
    except (UnknownModel, ModelError, Unmeasurable):
        return None


def _measured(
    adapter: ModelAdapter, resolved: Resolved, cond: Condition, unconditional: Condition | None, *, frozen: bool
) -> RowFlop:
    adapter.unconditional = None if unconditional is None else _one(unconditional)
    counter, scale = Evaluations(adapter.network), resolved.run.rollout.guidance_scale
    x, timestep = torch.empty(1, *adapter.latent_shape()), torch.full((1,), 500.0)

    def forward() -> Tensor:
        return adapter.predict(x, timestep, cond, scale).float()

    _, once = measured(forward, grad=False)
    rows = counter.rows
    both = once if frozen else measured(lambda: forward().square().mean().backward(), grad=True)[1]
    return RowFlop(once / rows, (both - once) / rows)


def _one(cond: Condition) -> Condition:
    """One row without values, shaped like those of `cond`."""
    rows: dict[str, Tensor | list[Tensor]] = {}
    for name, value in cond.tensors.items():
        if isinstance(value, list):
            middle = sorted(value, key=len)[len(value) // 2]
            rows[name] = [torch.empty(middle.shape, dtype=middle.dtype)]
        else:
            rows[name] = torch.empty((1, *value.shape[1:]), dtype=value.dtype)
    return Condition(rows)
