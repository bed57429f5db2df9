"""AWM: the weighted matching error of the finished sample stands in for its log-prob.

    1. sample x0 with the policy by any solver, no CFG; A within the prompt, clipped and rescaled to |A| <= 1
    2. for every sample T times sigma: l = mean (v - v*)^2, lp = -sigma ((l + e)^p - e^p) / p
    3. ratio exp(lp - lp_old), PPO's clip; at the first update of an iteration the ratio is 1 and the gradient A grad lp
    4. + beta mean (v - v_ref)^2 + beta_ema mean (v - v_ema)^2
    5. after the iteration: ema <- d ema + (1 - d) policy, d = min(0.001 steps, 0.3)

The KL terms and the bounded weighting hold it: without them runs collapse. A ratio of means over dims moves by 1e-6
to 1e-3, so a clip range acts from about 1e-4 down; the published 1 never does.

Source: arXiv 2509.25050; scxue/advantage_weighted_matching:advantage_weighted_matching/scripts/train_sd3_awm.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, BoundOptions, LagConfig, NormOptions, pull, pulling
from flowrl.algorithms._options import ClipRange, CreditOptions, SolverOptions, TimesOptions, clip_bounds
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import ErrorWeighting, group_mean, matching_log_prob
from flowrl.losses.ratio import clipped_ratio_loss
from flowrl.rollout.outputs import Outputs

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(NormOptions, BoundOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete_wo_init"))
    weighting: ErrorWeighting = "ghuber"
    """Weight of the error in the log-prob; see `flowrl/losses/matching.py`."""
    power: float = 0.25
    """p of `ghuber`, in (0, 1]."""
    ratio: Literal["term", "sample"] = "term"
    """One ratio for each time, or one per sample, of the mean log-prob over its times."""
    clip_range: ClipRange = 1.0
    """Bound on |ratio - 1|, in units of a mean over dims; two numbers: its largest fall and rise."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=1e-3))
    """Pull to the untouched network."""
    ema_kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=1.0))
    """Pull to a slow average of the policy."""
    ema: LagConfig = field(default_factory=lambda: LagConfig(limit=0.3))
    """Pace of that average."""
    off_policy: bool = False
    """Sample with the average and take the ratio against it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power <= 1:
            raise ValueError(f"power={self.power} must be in (0, 1]")
        clip_bounds(self.clip_range)


class Awm(SampleMethod[Config]):
    keeps_old = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(config.norm_guard, reference=config.kl, anchor=config.ema_kl)
        if config.ema_kl.coef > 0 or config.off_policy:
            self.lags = {"anchor": config.ema}
        self.behaviour = "anchor" if config.off_policy else "policy"
        self.unit = "sample" if config.ratio == "sample" else "term"

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return self.config.rescaled(self.rule(rewards, weights, prompts))

    def log_prob(self, outputs: Outputs) -> Tensor:
        """The stand-in for the log-prob of each term, [M] float64."""
        return matching_log_prob(outputs.error(), outputs.batch.sigma, self.config.weighting, self.config.power)

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return self.log_prob(self.outputs(batch, networks, ()))

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        log_prob = self.log_prob(outputs)
        log_ratio = log_prob - (log_prob.detach() if batch.old is None else batch.old)
        if config.ratio == "sample":
            log_ratio = group_mean(log_ratio, batch.sample)
        policy, clipped = clipped_ratio_loss(log_ratio, batch.advantage.double(), clip_bounds(config.clip_range))
        policy = policy + pull(config.ema_kl, outputs, "anchor")
        metrics = {
            "policy/loss": policy,
            "policy/clip_fraction": clipped.double(),
            "policy/ratio_mean": log_ratio.exp(),
        }
        loss = summed(policy + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())
        return config.guarded(loss, outputs)


build = Awm
