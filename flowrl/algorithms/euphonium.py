"""Euphonium: DanceGRPO on samples that the slope of a judge of latents pulls on their way.

    1. roll out as DanceGRPO does, but with x' = mu + pull + std z, pull = lambda std^2 / 2 dr/dx(x, sigma): r the logit
       of a judge of noisy latents, which takes the place of a part of the score. Sampling later needs no judge
    2. A of each step: that of its sample, and weight x r(x, sigma) compared over the group (`step_values`, of: value)
    3. DanceGRPO's loss. Ratio and both log-probs are of mu, without the pull: samples that the pull has made better
       have A > 0, and so mu learns it. The ratio is 1 before the first update, its mean over the samples need not be
    4. the distilled form adds distil x mean_d (v - v_old - pull / dt)^2 at the pulled steps

Source: arXiv 2602.04928; zerzerzerz/Euphonium.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.algorithms._options import RatioOptions, SpatialOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.dance_grpo import SeparateConfig, ShareOptions
from flowrl.algorithms.flow_grpo import ClipOptions, StepCreditOptions, clipped_terms, with_reference
from flowrl.core.strict import require_not_negative
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.matching import mean_square
from flowrl.rollout.policy import by_edge
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class TiltConfig:
    """The pull of a judge of latents on the rollout."""

    output: str
    """Of an entry of `rewards` that judges latents, clean and noisy; its weight may be 0."""
    strength: float = 0.32
    """lambda: a step's noise then belongs to a density weighted by exp(lambda r); 0: no pull."""
    steps: list[int] | None = None
    """Stochastic steps with a pull, counted from 0; null: all."""
    distil: float = 0.0
    """Weight of the distilled form's distance; 0: none."""

    def __post_init__(self) -> None:
        require_not_negative(vars(self), "strength", "distil")


@dataclass(frozen=True, kw_only=True)
class Config(StepCreditOptions, ShareOptions, SpatialOptions, StepOptions, ClipOptions, RatioOptions):
    """DanceGRPO's options, and the pull."""

    default_sampler: ClassVar[str] = "dance_sde"

    timestep_fraction: float = 0.6
    advantages: SeparateConfig = field(default_factory=SeparateConfig.published)
    tilt: TiltConfig | None = None
    """Pull of a judge of latents on the rollout: {output, strength, steps, distil}; null: DanceGRPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one(self.spatial)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        self.check_trained(1, self.most_trained(num_steps))


class Euphonium(EdgeMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.distil = 0.0 if config.tilt is None else config.tilt.distil
        self.columns = ("velocity_old",) if self.distil else ()

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        plan, tilt = super().plan(schedule, sampler, iteration, seed), self.config.tilt
        if tilt is None:
            return plan
        pulled = plan.train if tilt.steps is None else tilt.steps
        return replace(plan, tilt=tuple(tilt.strength / 2 * (k in pulled) for k in range(len(plan))))

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        return self.config.kept(ids, plan, iteration, seed)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy = networks.policy
        prediction = policy.predict(batch.latents, batch.start, batch.cond)
        own = by_edge(policy.distribution(prediction, batch.latents, batch.start), batch)
        log_ratio = self.log_ratio(own, batch, policy.sampler)
        terms = clipped_terms(log_ratio, batch.advantage.unbind(1), self.config.rule(policy.sampler))
        if self.distil:
            apart = mean_square(batch.by_edge(prediction.velocity), batch.columns["velocity_old"]).float()
            apart = apart * (torch.tensor(batch.plan.tilt)[batch.steps] > 0).to(apart)
            metrics = terms.metrics | {"policy/distilled": apart.detach().sum()}
            terms = replace(terms, loss=terms.loss + self.distil * apart, metrics=metrics)
        return with_reference(terms, own, batch, networks, self.config.kl)


build = Euphonium
