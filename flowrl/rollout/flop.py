"""Operations of the network for one row, counted on tensors without values: the useful work of a run's forwards."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.generic.outline import Unmeasurable
from flowrl.models.memory.meter import faked, measured
from flowrl.models.pipelines.skeletons import UnknownModel
from flowrl.models.weights.roles import trainable
from flowrl.rollout.policy import Evaluations, Policy


@dataclass(frozen=True, slots=True)
class RowFlop:
    """Floating-point operations of one row through the network; a multiply-add counts as 2."""

    forward: float
    backward: float
    """Of its backward pass; nothing is counted twice where gradient checkpointing repeats a forward."""

    def of(self, rows: int, with_gradient: int) -> float:
        """Operations of `rows` forwards, `with_gradient` of which have a backward pass."""
        return rows * self.forward + with_gradient * self.backward


def row_flop(
    skeleton: Callable[[ModelConfig], ModelAdapter],
    config: ModelConfig,
    policy: Policy,
    cond: Condition,
    *,
    frozen: bool,
) -> RowFlop | None:
    """Operations of one row of a policy's forwards; None where its model cannot be measured without weights. `skeleton`
    is the model's adapter without weights, by its options; the policy has the embedding that guidance leads away from,
    and the scale. Of `cond`, conditions of prompts, the shapes are taken: of texts with lengths of their own the middle
    one. A `frozen` network has no backward pass.
    """
    # What computes the same in another way is left out: it must not count as useful.
    # All branches of guidance have a gradient, so that each row is counted alike; how many had one is counted in a run.
    plain = {"gradient_checkpointing": False, "guidance_gradient": "both", "compile": None}
    config = dataclasses.replace(config, memory=type(config.memory)(), init_lora=None, **plain)
    unconditional = policy.adapter.unconditional
    try:
        adapter = skeleton(config)
        with torch.device("meta"):
            if not frozen:
                trainable(adapter, config, 0)
        with faked(adapter.network):
            adapter.unconditional = None if unconditional is None else _one(unconditional)
            return _measured(adapter, policy.guidance_scale, _one(cond), frozen=frozen)
    except (UnknownModel, ModelError, Unmeasurable):
        return None


def _measured(adapter: ModelAdapter, scale: float, cond: Condition, *, frozen: bool) -> RowFlop:
    counter = Evaluations(adapter.network)
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
