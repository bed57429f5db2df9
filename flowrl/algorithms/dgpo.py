"""DGPO: preference between the good and the bad half of a prompt's group, as a weighted matching loss.

    1. sample x0 with the policy (after a while with its average) by any solver
    2. M nodes of the grid, the same for all samples; one eps per prompt and time
    3. W = sigmoid(beta / G sum over the group of A (l - l_ref)), without gradient
    4. a term whose ratio exp(l_old - l) has already left 1 +- c to the side that A wants has no gradient
    5. loss = W A l + kl mean (v - v_ref)^2

The gradient is that of -log sigmoid(-beta / G sum A (l - l_ref)) over beta / G. With two samples and A = +-1 it is
Diffusion-DPO.

Source: arXiv 2510.08425; Luo-Yihong/DGPO:scripts/train_sd3_dgpo.py.
"""

from dataclasses import dataclass, field

import torch

from flowrl.algorithms._matching import AnchorConfig, LagConfig, pull, pulling
from flowrl.algorithms._options import CreditOptions, ReferenceOptions, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import group_preference_weight, overshot
from flowrl.models.weights.roles import Weights

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(ReferenceOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="subset", count=4, fraction=0.7))
    advantages: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(std="group"))
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=1e-3))
    """Pull to the untouched network."""
    beta: float = 100.0
    """Inverse temperature of the group's margin: 10 to 100 against the untouched network, 2000 to 5000 against the
    average. It is not in the gradient's scale."""
    clip_range: float = 1e-2
    """c, in units of a mean over dims: 1e-3 to 1e-2 with CFG in the rollout, 1e-5 to 1e-4 without."""
    against_average: bool = False
    """Take the margin against the average instead of the untouched network."""
    average: LagConfig = field(default_factory=lambda: LagConfig(limit=0.3))
    """The average of the policy, which is also the `old` of the ratio."""
    sample_average_from: int | None = 200
    """Optimizer steps after which the average draws the samples; null: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "beta", "clip_range")
        require_not_negative(vars(self), "sample_average_from")


class Dgpo(SampleMethod[Config]):
    unit = "group"
    shared_times = "all"
    eps = "group"
    remembers = ("behaviour",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.behaviour = "policy"
        self.against = "average" if config.against_average else "reference"
        self.compared = tuple(dict.fromkeys((*pulling(reference=config.kl), self.against, "average")))
        self.lags = {"average": config.average}

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs, advantage = self.config, self.outputs(batch, networks), batch.advantage.double()
        error = outputs.error()
        held = overshot(error, outputs.error("average"), advantage, config.clip_range)
        weight = group_preference_weight(advantage, error, outputs.error(self.against), batch.group, config.beta)
        policy = weight * advantage * torch.where(held, error.detach(), error)
        metrics = {"policy/loss": policy, "policy/clip_fraction": held.double(), "policy/group_weight": weight}
        return summed(policy + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())

    def after_iteration(self, updates: int, weights: Weights) -> None:
        super().after_iteration(updates, weights)
        start = self.config.sample_average_from
        self.behaviour = "policy" if start is None or updates < start else "average"


build = Dgpo
