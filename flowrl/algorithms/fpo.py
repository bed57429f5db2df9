"""FPO: PPO with the ratio of matching errors, over several passes through the same samples.

    1. sample x0 with the policy; for every sample T pairs (sigma, eps), kept with their error l_old
    2. ratio exp(mean over the pairs of l_old - l), or one ratio per pair, the exponent within +-3
    3. PPO's clip, the same pairs in every pass; with `negative: quadratic` bad samples have -A d + d^2 / (2 c) instead,
       d the log ratio and c the clip range: ours, after FPO++, whose form is not known to us

Errors are means over dims, so on images the clip range is of the order of 1e-4; the published 0.05 is for actions
of a few dims.

V-GRPO is this with the error mean (x0_hat - x0)^2 / mean |x0_hat - x0|, the divisor without gradient (`supervise:
clean`), pairs that a prompt's samples share, A bounded by eta tanh(A / eta), one pass and one update; with more updates
+ kappa mean (x0_hat - x0_hat_old)^2 (`old_kl`). On policy its gradient is that of DiffusionNFT at its `old`.

Source: arXiv 2507.21053; akanazawa/fpo:playground/src/flow_policy/fpo.py. V-GRPO: arXiv 2604.23380.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, LagConfig, PullOptions, pull, pulling
from flowrl.algorithms._options import ClipRange, CreditOptions, SolverOptions, TimesOptions, clip_bounds
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import group_mean
from flowrl.losses.ratio import Surrogate, clipped_ratio_loss, surrogate_loss
from flowrl.rollout.outputs import Outputs

LEVEL = "tested"
_BOUND = 3.0  # of a log ratio


@dataclass(frozen=True, kw_only=True)
class Config(PullOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="uniform", count=8, low=0.0, shift=1.0))
    passes: int = 2
    clip_range: ClipRange = 1e-4
    """Bound on |ratio - 1|, in units of a mean over dims; two numbers: its largest fall and rise."""
    ratio: Literal["sample", "term"] = "sample"
    """Average the pairs of a sample, then exponentiate; or one ratio per pair, finer and biased upwards."""
    supervise: Literal["eps", "velocity", "clean"] = "eps"
    """Error of the noise that the network implies, (1 - sigma)^2 l on a flow, or of its output, l; or of its clean
    prediction, over the mean absolute error (V-GRPO)."""
    shared: bool = False
    """Whether the samples of a prompt share their pairs (V-GRPO), so that what their errors have in common cancels."""
    soft_clip: float | None = None
    """eta: A becomes eta tanh(A / eta), after `advantages.clip` (V-GRPO: 3); null: it stays."""
    negative: Literal["clip", "quadratic"] = "clip"
    """Loss of a negative advantage: PPO's, or with a pull to ratio 1 on every term, also of several passes."""
    old_kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull to the clean predictions of the network that drew the samples (V-GRPO's kappa)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        clip_bounds(self.clip_range)
        require_positive(vars(self), "soft_clip")


class Fpo(SampleMethod[Config]):
    keeps_old = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(reference=config.kl, old=config.old_kl)
        if config.old_kl.coef > 0:
            self.lags = {"old": LagConfig(slope=0.0, limit=0.0)}  # the policy as the next iteration draws with it
        if config.shared:
            self.shared_times = self.eps = "group"
        self.unit = "sample" if config.ratio == "sample" else "term"

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        credit, bound = self.rule(rewards, weights, prompts), self.config.soft_clip
        return credit if bound is None else replace(credit, values=bound * (credit.values / bound).tanh())

    def error(self, outputs: Outputs) -> Tensor:
        """The error of each pair, [M] float64."""
        if self.config.supervise == "clean":
            return outputs.error(space="clean") / outputs.distance(space="clean")
        return outputs.error(space="output" if self.config.supervise == "velocity" else "eps")

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return self.error(self.outputs(batch, networks, ()))

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        error = self.error(outputs)
        log_ratio = (error.detach() if batch.old is None else batch.old) - error
        if config.ratio == "sample":
            log_ratio = group_mean(log_ratio, batch.sample)
        advantage, clip, free = batch.advantage.double(), clip_bounds(config.clip_range), log_ratio
        log_ratio = log_ratio.clamp(-_BOUND, _BOUND)
        policy, clipped = clipped_ratio_loss(log_ratio, advantage, clip)
        if config.negative == "quadratic":
            # Of the ratio as it is: beyond the bound of exponents there would be no pull.
            pulled = surrogate_loss(free, advantage, Surrogate(name="quadratic", bounds=clip))
            bad = advantage < 0
            policy, clipped = torch.where(bad, pulled[0], policy), torch.where(bad, pulled[1], clipped)
        policy = policy + pull(config.old_kl, outputs, "old", "clean")
        metrics = {
            "policy/loss": policy,
            "policy/clip_fraction": clipped.double(),
            "policy/ratio_mean": log_ratio.exp(),
        }
        return summed(policy + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())


build = Fpo
