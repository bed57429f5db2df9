"""CRD: centred reward distillation: within a prompt, implicit rewards are fitted to the given ones.

    1. sample x0 with the lagging network `sampling`, no CFG
    2. r = clip(A / (2 A_max) + 1/2, 0, 1);  R = l_old / w_old - l / w, w = mean |v - v*| without gradient
    3. both centred within the prompt, which removes log Z(c): with all weights alike, or in two pools
    4. loss = A_max / beta (beta R' - r')^2 + kappa (m + (1 - m) r) mean (v - v_ref)^2, v_ref under CFG
    5. after the iteration `old` and `sampling` follow the policy, each at its own pace

Centred per prompt, as in the paper; Flow-Factory's port takes one mean over all prompts of a batch, and its two
pools test r > 0 where they mean A > 0.

Source: arXiv 2603.14128; X-GenGroup/Flow-Factory:trainers/crd.py.
"""

from dataclasses import dataclass, field

import torch

from flowrl.algorithms._matching import AnchorConfig, LagConfig, pull, pulling
from flowrl.algorithms._options import CreditOptions, ReferenceOptions, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.errors import OptionError
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import RewardFit, centred, implicit_reward, optimality, pool_weights, reward_fit

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(ReferenceOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="permutation", count=None, fraction=0.99))
    beta: float = 1.0
    """Scale of the implicit reward against the given one."""
    fit: RewardFit = "mse"
    """Squared difference, or cross-entropy with the sigmoid of the centred reward."""
    adaptive: bool = True
    """Divide errors by their mean absolute error."""
    pools: float | None = None
    """Null: centre by the plain mean. 0: by the mean of the good and that of the bad samples, losses averaged.
    Above 0: by softmax means at this temperature, of r and of -r."""
    old: LagConfig = field(default_factory=lambda: LagConfig(start=0.25, slope=0.005, limit=0.999))
    """Pace of `old`, whose error the implicit reward is taken against."""
    sampling: LagConfig = field(default_factory=lambda: LagConfig(flat=75, slope=0.0075, limit=0.999))
    """Pace of the network that draws the samples."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.1))
    """kappa, the pull to the untouched network."""
    least_pull: float = 1e-3
    """m: share of the pull that samples of no reward get; 1 pulls on all alike."""
    reference_guidance: float = 4.5
    """CFG of the untouched network; where guidance is an input of the network, it gets the policy's value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise ValueError(f"beta={self.beta} must be positive")
        if not 0 <= self.least_pull <= 1:
            raise ValueError(f"least_pull={self.least_pull} must be in [0, 1]")
        if self.pools is not None and self.pools != 0 and not self.pools >= 0.01:  # exponentials of 1 / pools
            raise ValueError(f"pools={self.pools} must be 0 or at least 0.01, or null for the plain mean")
        if self.advantages.clip is None:
            raise OptionError(
                "advantages.clip=null: optimality is the advantage within its bound", {"advantages.clip": 5.0}
            )


class Crd(SampleMethod[Config]):
    unit = "group"
    shared_times = "group"
    behaviour = "sampling"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = (*pulling(reference=config.kl), "old")
        self.lags = {"old": config.old, "sampling": config.sampling}

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        assert config.advantages.clip is not None
        given = optimality(batch.advantage, config.advantages.clip).double()
        implied = implicit_reward(
            outputs.by_role["policy"], outputs.by_role["old"], outputs.target, adaptive=config.adaptive
        )
        parts = [
            reward_fit(
                config.beta * centred(implied, batch.group, weight), centred(given, batch.group, weight), config.fit
            )
            for weight in pool_weights(given, batch.advantage, batch.group, config.pools)
        ]
        policy = torch.stack(parts).mean(dim=0) * (config.advantages.clip / config.beta)
        share = config.least_pull + (1 - config.least_pull) * given
        metrics = {"policy/loss": policy, "policy/optimality": given, "policy/implicit_reward": implied}
        return summed(policy + share * pull(config.kl, outputs, "reference"), metrics | outputs.metrics())


build = Crd
