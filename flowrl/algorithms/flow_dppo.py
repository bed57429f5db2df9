"""Flow-DPPO: instead of a ratio clip, a term is dropped where the step has already moved far in the right direction.

    1. roll out and credit as Flow-GRPO; keep mean_old of every trained step
    2. per edge KL = mean over dims of (mean - mean_old)^2 / (2 std^2), ratio r = exp(log p - log p_old)
    3. loss = 0 where KL >= threshold and (r > 1 and A > 0, or r < 1 and A < 0); else -A r, unclipped

On policy nothing is dropped and the gradient is Flow-GRPO's. With `outside: project` 3 is

    mean~ = mean_old + (mean - mean_old) min(1, sqrt(threshold / KL)), r~ its ratio
    loss = -A r~ + pull * KL(mean | mean~), no gradient through the last mean~

Source: arXiv 2606.11025; Tencent-Hunyuan/UniRL:unirl/algorithms/flowdppo.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import Terms, ratio_metrics, single_advantage, with_reference
from flowrl.core.strict import require_not_negative
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import masked_ratio_loss, projected
from flowrl.samplers.base import StepDistribution

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(RatioOptions, StepOptions):
    threshold: float = 1e-5
    """KL to the old policy from which on an aligned term is dropped; a mean over dims, so small latents need more."""
    divisor: Literal["variance", "none"] = "variance"
    """`variance`: the Gaussian KL; `none`: the plain square of the mean's change, twice what the official code
    compares without its coefficient."""
    outside: Literal["drop", "project"] = "drop"
    """What becomes of a step beyond the threshold: `drop` its term, if it is aligned; `project` draws its mean back to
    the threshold, whichever way it moved, and adds a pull. `policy/clip_fraction` is their share."""
    pull: float = 1.0
    """Weight of the KL of a step that was drawn back to where it was drawn to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} must not be negative")
        require_not_negative(vars(self), "pull")


class FlowDppo(EdgeMethod[Config]):
    columns = ("mean_old",)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        config, policy, advantage = self.config, networks.transition(batch), single_advantage(batch)
        mean_old, sampler = batch.columns["mean_old"], networks.policy.sampler
        moved = policy.kl(StepDistribution(mean_old, policy.std), divisor=config.divisor).detach()
        if config.outside == "drop":
            log_ratio = self.log_ratio(policy, batch, sampler)
            loss, dropped = masked_ratio_loss(log_ratio, advantage, moved >= config.threshold)
        else:
            drawn, dropped = projected(policy, mean_old, config.threshold, config.divisor)
            log_ratio = self.log_ratio(drawn, batch, sampler)
            back = replace(drawn, mean=drawn.mean.detach())
            loss = -advantage * log_ratio.exp() + config.pull * policy.kl(back, divisor=config.divisor)
        metrics = ratio_metrics(log_ratio, loss) | {
            "policy/kl_old": moved.sum(),
            "policy/clip_fraction": dropped.float().sum(),
            "policy/clip_fraction_positive": (dropped & (advantage > 0)).float().sum(),
            "policy/clip_fraction_negative": (dropped & (advantage < 0)).float().sum(),
        }
        per_step = {"policy/ratio": log_ratio.detach().exp(), "policy/clip_fraction": dropped.float()}
        return with_reference(Terms(loss, metrics, per_step), policy, batch, networks, config.kl)


build = FlowDppo
