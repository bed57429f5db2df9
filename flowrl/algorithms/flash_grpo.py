"""Flash-GRPO: one stochastic, trained step a sample, which differs between the prompts and not within one.

    1. every prompt has a step k of the pool; its samples take k by the SDE and all others by the ODE
    2. A within the prompt, clipped: what is compared had its noise at the same step
    3. loss = w_k max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef KL, w_k = c_k over its mean over the pool,
       c_k = 1 / |d log p / d velocity|: std_k / |gain_k| of a Gaussian, so that all steps pull equally hard

An iteration spreads the pool evenly over its prompts, in an order of its own (as UniRL; the official code draws each k
by itself). A pool of one step is Flow-GRPO-Fast with a window of that step.

Source: arXiv 2605.15980; Shredded-Pork/Flash-GRPO; Tencent-Hunyuan/UniRL:unirl/algorithms/flashgrpo.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.algorithms.sage_grpo import gradient_norms
from flowrl.core.tensors import sent
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import spread
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(StepOptions, ClipOptions, RatioOptions):
    default_sampler: ClassVar[str] = "wan_sde"

    sde_steps: list[int] | None = None
    """The pool: steps of which each prompt has one, counted from 0 (noisiest); null: the first half of the grid, as
    published."""
    weighted: bool = True
    """Weigh steps by w_k; false weighs all alike."""

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int]:
        return list(range(max(1, len(schedule) // 2))) if self.sde_steps is None else self.sde_steps


class FlashGrpo(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        plan = super().plan(schedule, sampler, iteration, seed)
        return replace(plan, own=spread(plan.train, seed, iteration))

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        plan, weight = batch.plan, None
        if self.config.weighted:
            strength = 1 / gradient_norms(plan, networks.policy.sampler, networks.policy.adapter.process)
            place = strength.new_zeros(len(plan))
            place[list(plan.train)] = strength / strength.mean()
            weight = sent(place, batch.latents.device)[batch.step.index]
        return clipped_loss(self, batch, networks, weight)


build = FlashGrpo
