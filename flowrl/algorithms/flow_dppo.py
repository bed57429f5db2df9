"""Flow-DPPO: instead of a ratio clip, a term is dropped where the step has already moved far in the right direction.

    1. roll out and credit as Flow-GRPO; keep mean_old of every trained step
    2. per edge KL = mean over dims of (mean - mean_old)^2 / (2 std^2), ratio r = exp(log p - log p_old)
    3. loss = 0 where KL >= threshold and (r > 1 and A > 0, or r < 1 and A < 0); else -A r, unclipped

On policy nothing is dropped and the gradient is Flow-GRPO's.

Source: arXiv 2606.11025; Tencent-Hunyuan/UniRL:unirl/algorithms/flowdppo.py.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import Terms, ratio_metrics, single_advantage, with_reference
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import masked_ratio_loss
from flowrl.samplers.base import StepDistribution

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(RatioOptions, StepOptions):
    threshold: float = 1e-5
    """KL to the old policy from which on an aligned term is dropped; a mean over dims, so small latents need more."""
    divisor: Literal["variance", "none"] = "variance"
    """`variance`: the Gaussian KL; `none`: the plain square of the mean's change, twice what the official code
    compares without its coefficient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} must not be negative")


class FlowDppo(EdgeMethod[Config]):
    columns = ("mean_old",)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, advantage = networks.transition(batch), single_advantage(batch)
        log_ratio = self.log_ratio(policy, batch, networks.policy.sampler)
        moved = policy.kl(StepDistribution(batch.columns["mean_old"], policy.std), divisor=self.config.divisor).detach()
        loss, dropped = masked_ratio_loss(log_ratio, advantage, moved >= self.config.threshold)
        metrics = ratio_metrics(log_ratio, loss) | {
            "policy/kl_old": moved.sum(),
            "policy/clip_fraction": dropped.float().sum(),
            "policy/clip_fraction_positive": (dropped & (advantage > 0)).float().sum(),
            "policy/clip_fraction_negative": (dropped & (advantage < 0)).float().sum(),
        }
        per_step = {"policy/ratio": log_ratio.detach().exp(), "policy/clip_fraction": dropped.float()}
        return with_reference(Terms(loss, metrics, per_step), policy, batch, networks, self.config.kl)


build = FlowDppo
