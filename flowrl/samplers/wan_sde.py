"""Wan-SDE: the Euler-Maruyama step with noise in proportion to sigma (Flow-GRPO's Wan script).

With sigma_1 the grid's second sigma (`Step.sigma_ceiling`), dt = sigma_next - sigma < 0:

    g    = sigma_1 * sigma
    mean = x + (velocity + g^2 / (2 sigma) * eps_hat) * dt
    std  = g * sqrt(-dt)

The code writes g = sigma_min + (sigma_1 - sigma_min) * sigma with sigma_min the grid's last value, 0.
Singular points: none; g^2 / sigma stays finite down to sigma = 0. The noise has no strength to set: a step's
noise level is 1 (on) or 0 (the Euler step). Log-prob form: mean over dims.

Source: arXiv 2505.05470; yifan123/flow_grpo:flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py.
"""

from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Step
from flowrl.samplers.base import FlowSampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


class WanSde(FlowSampler):
    kl_divisor = "variance"
    clip_ranges = (("mean", "plain", 1e-3),)

    def diffusion(self, step: Step) -> Tensor:
        """sigma_1 * sigma, or 0, [B].

        Raises ValueError: a noise level other than 0 and 1.
        """
        levels = step.on_cpu.noise_level
        other = (levels != 0) & (levels != 1)
        if bool(other.any()):
            level = float(levels[other][0])
            raise ValueError(f"sampler 'wan_sde' has no strength: noise_level={level:g} must be 1 (on) or 0 (off)")
        return step.noise_level * step.sigma_ceiling * step.sigma

    def default_noise_level(self) -> float:
        return 1.0


build = WanSde
