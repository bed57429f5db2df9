"""DanceGRPO: GRPO with constant noise, a random subset of the steps for each sample, one loss per reward.

    1. roll out G samples per prompt from one shared noise (`rollout.shared_noise`), every step but the last with the
       Dance-SDE: std = eta sqrt(|dt|)
    2. A_k = (r_k - mean of the group) / (std of the group + 1e-8) for each reward k, clipped to +-5; of n samples
       keep the best and the worst by sum_k w_k A_k (`advantages.select`), without normalising again
    3. of the K trained steps each sample keeps int(K * timestep_fraction), drawn anew
       loss = sum_k max(-w_k A_k ratio, -w_k A_k clamp(ratio, 1 - c, 1 + c))

The last step is deterministic, so the decoded latent is its x0_hat, as in the official code. No KL by default.

Source: arXiv 2505.07818; XueZeyue/DanceGRPO:fastvideo/train_grpo_flux.py, train_grpo_hunyuan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from flowrl.advantages import AdvantageConfig
from flowrl.algorithms._grpo import ClippedConfig, GrpoBase, clipped_terms, with_reference
from flowrl.algorithms.base import Networks
from flowrl.plan import StepPlan, step_subsets
from flowrl.samplers.base import Sampler
from flowrl.types import LossOutput, Microbatch, SampleId

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedConfig):
    SEPARATE: ClassVar[bool] = True
    SPATIAL: ClassVar[bool] = True

    timestep_fraction: float = 0.6
    """Share of the trained steps that each sample keeps, rounded down."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="separate", std="group", eps=1e-8, ddof=1)
    )

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction={self.timestep_fraction} must lie in (0, 1]")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedConfig.check(self, sampler, num_steps)
        trained = num_steps - 1 if self.sde_steps is None else len(set(self.sde_steps))
        if int(trained * self.timestep_fraction) < 1:
            raise ValueError(
                f"timestep_fraction={self.timestep_fraction} of {trained} trained steps keeps none; "
                f"it must be at least {1 / trained:.3g}"
            )


class DanceGrpo(GrpoBase[Config]):
    level = LEVEL

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor | None:
        return step_subsets(ids, plan.train, self.config.timestep_fraction, seed, iteration).flatten()

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        # One column per reward, its weight inside: max() and a sum over rewards do not commute where a clip is active.
        terms = clipped_terms(log_ratio, batch.advantage.unbind(1), self.config.clip(sampler))
        return with_reference(terms, policy, batch, networks, self.config.kl)


def build(config: Config) -> DanceGrpo:
    return DanceGrpo(config)
