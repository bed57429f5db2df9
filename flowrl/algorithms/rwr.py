"""RWR: reward-weighted regression: every sample is imitated in proportion to a weight that is never negative.

    1. sample x0 with the policy
    2. w = G softmax(r / tau) within the prompt, or exp(tau r), or r itself, or 1 where r >= C
    3. loss = w mean (v - v*)^2 + kl mean (v - v_ref)^2

Weights are not centred, so samples of equal reward train too: the method then distils itself. With a small tau one
sample has all the weight. `policy/weight` and `policy/weight_square` are means over terms: the one squared over the
other is the effective sample size (sum w)^2 / sum w^2 as a share of the samples.

Source: arXiv 2305.13301 (its baselines); yifan123/flow_grpo:scripts/train_sd3_sft.py; arXiv 2502.06061 for exp and KL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.advantages import AdvantageConfig, Advantages, aggregate
from flowrl.algorithms._matching import MatchingBase, MatchingConfig
from flowrl.algorithms.base import Networks
from flowrl.objectives import softmax_weights
from flowrl.types import LossOutput, NoisedBatch

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(MatchingConfig):
    weighting: Literal["softmax", "exp", "reward", "threshold"] = "softmax"
    temperature: float = 0.2
    """tau of `softmax`, in units of the weighted reward; `exp` multiplies by it instead."""
    threshold: float = 0.0
    """C of `threshold`."""

    def __post_init__(self) -> None:
        MatchingConfig.__post_init__(self)
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive")
        refuse_advantages(self)


class Rwr(MatchingBase[Config]):
    level = LEVEL

    def advantages(self, rewards: Tensor, weights: Tensor) -> Advantages:
        return imitation(self.weights(aggregate(rewards, weights)), aggregate(rewards, weights))

    def weights(self, total: Tensor) -> Tensor:
        """Of weighted rewards [P, G], never negative, [P, G] float64; NaN has weight 0."""
        config = self.config
        if config.weighting == "softmax":
            return total.shape[1] * softmax_weights(total, config.temperature)
        filled = total.nan_to_num(-torch.inf)
        if config.weighting == "exp":
            return (config.temperature * filled).exp()
        return filled.clamp(min=0) if config.weighting == "reward" else (filled >= config.threshold).double()

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        return imitate(self, batch, networks)


def refuse_advantages(config: MatchingConfig) -> None:
    """Raise ValueError where an advantage rule is set that a method on raw rewards would not use."""
    if config.advantages != AdvantageConfig():
        raise ValueError("advantages: this method weighs raw rewards and takes no advantage rule; leave it out")


def imitate(method: MatchingBase, batch: NoisedBatch, networks: Networks) -> LossOutput:
    """w mean (v - v*)^2, with the weights of the samples as their credit."""
    outputs, weight = method.outputs(batch, networks), batch.advantage.double()
    metrics = {"policy/weight": weight, "policy/weight_square": weight.square()}
    return method.finished(weight * outputs.error(), outputs, metrics)


def imitation(weights: Tensor, total: Tensor) -> Advantages:
    """Weights [P, G] as the credit of a method that imitates: samples of weight 0 take no part.

    A group of equal rewards is not dead: it is imitated as it is.
    """
    valid = total.isfinite()
    dead = torch.zeros(len(total), dtype=torch.bool)
    return Advantages(values=weights.float()[:, :, None], valid=valid, dead=dead, kept=valid & (weights > 0))


def build(config: Config) -> Rwr:
    return Rwr(config)
