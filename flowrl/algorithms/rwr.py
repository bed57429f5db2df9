"""RWR: reward-weighted regression: every sample is imitated in proportion to a weight that is never negative.

    1. sample x0 with the network that was the policy at the last refresh (`_imitation.py` says why)
    2. w = G softmax(r / tau) within the prompt, or exp(tau r), or r itself, or 1 where r >= C
    3. loss = w mean (v - v*)^2 + kl mean (v - v_ref)^2

Weights are not centred, so samples of equal reward train too: the method then distils itself. With a small tau one
sample has all the weight. `policy/weight` and `policy/weight_square` are means over terms: the one squared over the
other is the effective sample size (sum w)^2 / sum w^2 as a share of the samples.

Source: arXiv 2305.13301 (its baselines); yifan123/flow_grpo:scripts/train_sd3_sft.py; arXiv 2502.06061 for exp and KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import imitation
from flowrl.algorithms._imitation import ImitationOptions, weighted_loss
from flowrl.algorithms._matching import PullOptions, pulling
from flowrl.algorithms._options import SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.losses.matching import softmax_weights

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ImitationOptions, PullOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete"))
    weighting: Literal["softmax", "exp", "reward", "threshold"] = "softmax"
    """Weight of a sample: within a prompt, of each by itself, the reward, or 1 above the threshold."""
    temperature: float = 0.2
    """tau of `softmax`, in units of the weighted reward; `exp` multiplies by it instead."""
    threshold: float = 0.0
    """C of `threshold`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(temperature=self.temperature)


class Rwr(SampleMethod[Config]):
    remembers = ("refreshes",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(reference=config.kl)
        self.behaviour, self.refresh = config.drawing

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        return weighted_loss(self.config.kl, self.outputs(batch, networks))

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return imitation(self.weights(aggregate(rewards, weights)), aggregate(rewards, weights))

    def weights(self, total: Tensor) -> Tensor:
        """Weights [P, G] float64 of weighted rewards [P, G], never negative; 0 for NaN."""
        config = self.config
        if config.weighting == "softmax":
            return total.shape[1] * softmax_weights(total, config.temperature)
        filled = total.nan_to_num(-torch.inf)
        if config.weighting == "exp":
            return (config.temperature * filled).exp()
        return filled.clamp(min=0) if config.weighting == "reward" else (filled >= config.threshold).double()


build = Rwr
