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

from dataclasses import dataclass, field
from typing import ClassVar

from flowrl.algorithms._grpo import SubsetConfig, SubsetGrpo, clipped_terms, with_reference
from flowrl.algorithms.base import Networks
from flowrl.credit.advantages import AdvantageConfig
from flowrl.losses.batches import LossOutput, Microbatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(SubsetConfig):
    SEPARATE: ClassVar[bool] = True
    SPATIAL: ClassVar[bool] = True

    timestep_fraction: float = 0.6
    """Share of the trained steps that each sample keeps, rounded down."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="separate", std="group", eps=1e-8, ddof=1)
    )


class DanceGrpo(SubsetGrpo[Config]):
    level = LEVEL

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        # One column per reward, its weight inside: max() and a sum over rewards do not commute where a clip is active.
        terms = clipped_terms(log_ratio, batch.advantage.unbind(1), self.config.clip(sampler))
        return with_reference(terms, policy, batch, networks, self.config.kl)


def build(config: Config) -> DanceGrpo:
    return DanceGrpo(config)
