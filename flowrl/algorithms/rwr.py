"""RWR: reward-weighted regression: every sample is imitated in proportion to a weight that is never negative.

    1. sample x0 with the network that was the policy at the last refresh
    2. w = G softmax(r / tau) within the prompt, or exp(tau r), or r itself, or 1 where r >= C
    3. loss = w mean (v - v*)^2 + kl mean (v - v_ref)^2

Weights are not centred, so samples of equal reward train too: the method then distils itself. With a small tau one
sample has all the weight. `policy/weight` and `policy/weight_square` are means over terms: the one squared over the
other is the effective sample size (sum w)^2 / sum w^2 as a share of the samples.

A network that imitates its own samples copies their discretisation error, and the next samples err twice: contrast and
reward fall within tens of iterations, whatever is rewarded. So the samples come from a network that follows later
(`refresh`), as in yifan123/flow_grpo (`ref_update_step`).

Source: arXiv 2305.13301 (its baselines); yifan123/flow_grpo:scripts/train_sd3_sft.py; arXiv 2502.06061 for exp and KL.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import imitation
from flowrl.algorithms._matching import AnchorConfig, PullOptions, pull, pulling
from flowrl.algorithms._options import Options, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import softmax_weights
from flowrl.rollout.outputs import Outputs

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class ImitationOptions(Options):
    """The network that draws the samples, here and in raft.py."""

    refresh: int | None = 40
    """Optimizer steps after which the samples are drawn by the policy as it then is; until then by the one before.
    0: always by the policy; null: always by the untouched one (offline)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh is not None and self.refresh < 0:
            raise ValueError(f"refresh={self.refresh} must not be negative; null never refreshes")

    @property
    def drawing(self) -> tuple[str, tuple[str, int] | None]:
        """The role that draws the samples, and `SampleMethod.refresh`."""
        return "sampling" if self.refresh != 0 else "policy", ("sampling", self.refresh) if self.refresh else None


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
        require_positive(vars(self), "temperature")


def weighted_loss(kl: AnchorConfig, outputs: Outputs) -> LossOutput:
    """w mean (v - v*)^2 + kl mean (v - v_ref)^2, summed over the terms; w are the advantages."""
    weight = outputs.batch.advantage.double()
    policy = weight * outputs.error()
    metrics = {"policy/loss": policy, "policy/weight": weight, "policy/weight_square": weight.square()}
    return summed(policy + pull(kl, outputs, "reference"), metrics | outputs.metrics())


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
