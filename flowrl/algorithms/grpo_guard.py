"""GRPO-Guard: a ratio without bias and scale, and a loss that weighs all steps alike.

With s the step's std, z = (x' - mean_old) / s the noise of the rollout, mean over latent dims:

    1. roll out and credit as Flow-GRPO, with the std of the group; keep mean_old of every trained step
    2. RatioNorm: log r_hat = mean(z * (mean - mean_old)), the plain log ratio freed of its negative bias and of 1 / s
    3. loss = delta * max(-A r_hat, -A clamp(r_hat, 1 - c, 1 + c)), delta = 1 / |d mean / d velocity|,
       so that on policy every step moves the velocity equally

The published weights are delta = 1 / |dt| (Flow-SDE, where below sigma = 1 it is `exact` up to a constant) and
beta / |dt| with beta = |d mean / d velocity| / |dt| (Dance-SDE, where `exact` would divide by beta). The KL is
added unscaled.

Source: arXiv 2510.22319; yifan123/flow_grpo:scripts/train_sd3_GRPO_Guard.py, config/grpo_guard.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.core.errors import OptionError
from flowrl.core.types import Step
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.process import Process, VPProcess
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import normalised_log_ratio
from flowrl.samplers.base import Ratio, Sampler, StepDistribution

LEVEL = "tested"
Reweight = Literal["exact", "flow_grpo", "dance_grpo", "none"]


@dataclass(frozen=True, kw_only=True)
class Config(StepOptions, ClipOptions, RatioOptions):
    ratio_norm: bool = True
    """False keeps the plain ratio, with its own clip range."""
    reweight: Reweight = "exact"
    """Weight of a step: `exact` 1 / |d mean / d velocity|; as published `flow_grpo` 1 / |dt|, `dance_grpo` beta / |dt|,
    flows only; `none` 1."""
    advantages: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(std="group"))

    @property
    def ratio(self) -> Ratio:
        return "ratio_norm" if self.ratio_norm else "plain"

    def check(self, sampler: Sampler, num_steps: int) -> None:
        if self.ratio_norm and sampler.log_prob_form != "mean":
            raise OptionError(
                f"ratio_norm=true normalises a Gaussian log-prob, the sampler's form is {sampler.log_prob_form!r}",
                {"ratio_norm": False},
            )
        super().check(sampler, num_steps)

    def check_process(self, process: Process) -> None:
        super().check_process(process)
        if self.reweight in ("flow_grpo", "dance_grpo") and isinstance(process, VPProcess):
            raise OptionError(
                f"reweight={self.reweight} divides by |dt|, which belongs to a flow's SDE; on this noise-prediction "
                "model (VP) the steps would count up to a hundredfold unevenly",
                [{"reweight": "exact"}, {"reweight": "none"}],
            )


def step_weight(form: Reweight, sampler: Sampler, step: Step) -> Tensor | None:
    """delta of each edge, [B]; None is 1."""
    if form == "none":
        return None
    length = (step.sigma_next - step.sigma).abs()
    if form == "flow_grpo":
        return 1 / length
    gain = sampler.velocity_gain(step).abs()
    return 1 / gain if form == "exact" else gain / length.square()


class GrpoGuard(EdgeMethod[Config]):
    columns = ("mean_old",)

    def log_ratio(self, policy: StepDistribution, batch: Microbatch, sampler: Sampler) -> Tensor:
        if not self.config.ratio_norm:
            return super().log_ratio(policy, batch, sampler)
        return normalised_log_ratio(policy, batch.columns["mean_old"], batch.next_latents)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        weight = step_weight(self.config.reweight, networks.policy.sampler, batch.step)
        return clipped_loss(self, batch, networks, weight)


build = GrpoGuard
