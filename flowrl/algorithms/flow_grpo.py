"""Flow-GRPO: online clipped policy gradient on flow models.

    1. roll out G samples per prompt with the Flow-SDE on the trained steps, the ODE elsewhere
    2. A = (r - mean of the prompt's group) / (std + 1e-4), clipped to +-5
    3. per trained step: ratio = exp(log p(x'|x) - log p_old(x'|x)), log p the mean over latent dims
       loss = max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef * KL(policy | reference)

Defaults are those of the official code; the last step is never trained, its Gaussian is too sharp.

Source: arXiv 2505.05470; yifan123/flow_grpo:scripts/train_sd3.py, config/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.advantages import AdvantageConfig, Advantages, advantages
from flowrl.algorithms.base import Networks, parity_tolerance
from flowrl.objectives import clipped_ratio_loss
from flowrl.plan import StepPlan, window
from flowrl.samplers.base import KLDivisor, LogProbForm, Sampler
from flowrl.schedules import Schedule
from flowrl.types import LossOutput, Microbatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    coef: float = 0.0
    """Weight of the KL to the reference; 0 computes no reference."""
    divisor: KLDivisor = "flow_grpo"
    """`variance`: the Gaussian KL; `flow_grpo`: without its factor 1/|dt|, as official code; `none`: plain square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    clip_range: float = 1e-4
    """Bound on |ratio - 1|, in mean-over-dims log-prob units (4096 dims and more; small latents need more)."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all but the last."""
    guidance_scale: float | None = None
    """Of the training forward; methods with log-probs take rollout's, so only that value or null is accepted."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """`recompute` evaluates it once more at training geometry, where the two differ by more than the parity gate."""

    def __post_init__(self) -> None:
        if self.clip_range <= 0:
            raise ValueError(f"clip_range={self.clip_range} must be positive")
        if self.advantages.name == "separate":
            raise ValueError("advantages.name=separate: flow_grpo has one loss for all rewards; use per_reward or gdpo")
        if self.kl.coef < 0:
            raise ValueError(f"kl.coef={self.kl.coef} must not be negative")
        if self.sde_steps is not None and (not self.sde_steps or min(self.sde_steps) < 0):
            raise ValueError(f"sde_steps={self.sde_steps} needs at least one step, counted from 0")


class FlowGrpo:
    needs: Literal["edges"] = "edges"
    columns: tuple[str, ...] = ()
    log_prob_form: LogProbForm = "mean"
    level = "tested"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.roles: tuple[str, ...] = ("reference",) if config.kl.coef > 0 else ()

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int) -> StepPlan:
        return window(schedule, sampler.default_noise_level(), self.config.sde_steps)

    def advantages(self, rewards: Tensor, weights: Tensor) -> Advantages:
        return advantages(rewards, weights, self.config.advantages)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        advantage = batch.advantage.squeeze(1)  # [E, 1] -> [E]: one merged reward
        policy = networks.transition(batch)
        log_ratio = policy.log_prob(batch.next_latents, self.log_prob_form) - batch.old_log_prob
        loss, clipped = clipped_ratio_loss(log_ratio, advantage, (self.config.clip_range, self.config.clip_range))
        ratio = log_ratio.detach().exp()
        per_step = {"policy/ratio": ratio, "policy/clip_fraction": clipped.float()}
        metrics = {
            "policy/loss": loss.detach().sum(),
            "policy/approx_kl": (0.5 * log_ratio.detach().square()).sum(),
            "policy/ratio_mean": ratio.sum(),
            "policy/clip_fraction": clipped.float().sum(),
        }
        if self.config.kl.coef > 0:
            reference = networks.frozen("reference", batch)
            dt = batch.step.sigma_next - batch.step.sigma
            kl = policy.kl(reference, divisor=self.config.kl.divisor, dt=dt)
            loss = loss + self.config.kl.coef * kl
            metrics["policy/kl_reference"] = kl.detach().sum()
        return LossOutput(loss=loss.sum(), metrics=metrics, per_step=per_step)

    def parity_tolerance(self, dtype: torch.dtype) -> float:
        return parity_tolerance(self.config.clip_range, dtype)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        if state:
            raise ValueError(f"flow_grpo keeps no state, the checkpoint has {sorted(state)}")


def build(config: Config) -> FlowGrpo:
    return FlowGrpo(config)
