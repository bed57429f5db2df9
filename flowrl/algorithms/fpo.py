"""FPO: PPO with the ratio of matching errors, over several passes through the same samples.

    1. sample x0 with the policy; for every sample T pairs (sigma, eps), kept with their error l_old
    2. ratio exp(mean over the pairs of l_old - l), or one ratio per pair, the exponent within +-3
    3. PPO's clip, the same pairs in every pass

Errors are means over dims, so on images the clip range is of the order of 1e-4; the published 0.05 is for actions
of a few dims.

Source: arXiv 2507.21053; akanazawa/fpo:playground/src/flow_policy/fpo.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flowrl.algorithms._matching import PullOptions, pull, pulling
from flowrl.algorithms._options import ClipRange, CreditOptions, SolverOptions, TimesOptions, clip_bounds
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import group_mean
from flowrl.losses.ratio import clipped_ratio_loss
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
    supervise: Literal["eps", "velocity"] = "eps"
    """Error of the noise that the network implies, (1 - sigma)^2 l on a flow, or of its output, l."""

    def __post_init__(self) -> None:
        super().__post_init__()
        clip_bounds(self.clip_range)


class Fpo(SampleMethod[Config]):
    keeps_old = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(reference=config.kl)
        self.unit = "sample" if config.ratio == "sample" else "term"

    def error(self, outputs: Outputs) -> Tensor:
        """The error of each pair, [M] float64."""
        return outputs.error(space="output" if self.config.supervise == "velocity" else "eps")

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return self.error(self.outputs(batch, networks, ()))

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        error = self.error(outputs)
        log_ratio = (error.detach() if batch.old is None else batch.old) - error
        if config.ratio == "sample":
            log_ratio = group_mean(log_ratio, batch.sample)
        log_ratio, clip = log_ratio.clamp(-_BOUND, _BOUND), clip_bounds(config.clip_range)
        policy, clipped = clipped_ratio_loss(log_ratio, batch.advantage.double(), clip)
        metrics = {
            "policy/loss": policy,
            "policy/clip_fraction": clipped.double(),
            "policy/ratio_mean": log_ratio.exp(),
        }
        return summed(policy + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())


build = Fpo
