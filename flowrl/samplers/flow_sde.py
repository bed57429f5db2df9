"""Flow-SDE: the Euler-Maruyama step of the SDE that keeps a flow's marginals (Flow-GRPO).

With g = noise_level * sqrt(sigma / (1 - bound)), dt = sigma_next - sigma < 0:

    mean = x + (velocity + g^2 / (2 sigma) * eps_hat) * dt
    std  = g * sqrt(-dt)

Singular point: 1 - sigma at sigma = 1. There `bound` is the grid's second sigma (`Step.sigma_ceiling`),
as in the official code, and sigma elsewhere. At sigma = 1 the std is then exactly noise_level.
Log-prob form: mean over dims.

Source: arXiv 2505.05470; yifan123/flow_grpo:flow_grpo/diffusers_patch/sd3_sde_with_logprob.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process
from flowrl.samplers.base import Sampler, StepDistribution, euler_maruyama, euler_maruyama_gain, require_flow

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    noise_level: float = 0.7
    """Strength a of the noise, dimensionless; 0 is the Euler step."""

    def __post_init__(self) -> None:
        if self.noise_level < 0:
            raise ValueError(f"noise_level={self.noise_level} must not be negative")


def diffusion(sigma: Tensor, noise_level: Tensor, sigma_ceiling: Tensor) -> Tensor:
    """g of the law above, [B].

    Raises:
        ValueError: sigma is 1 and so is sigma_ceiling; g diverges there.
    """
    bound = torch.where(sigma >= 1, sigma_ceiling, sigma)
    if bool((bound >= 1).any()):
        raise ValueError("the Flow-SDE diverges at sigma = 1; pass the grid's second sigma as sigma_ceiling")
    return noise_level * (sigma / (1 - bound)).sqrt()


def flow_sde_step(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: Tensor,
    sigma_ceiling: Tensor,
) -> StepDistribution:
    """The law above for latents x [B, ...]; all others but `velocity` are [B]. Raises as `diffusion` does.

    >>> x, v, one = torch.ones(1, 4), torch.full((1, 4), 0.5), torch.ones(1)
    >>> d = flow_sde_step(x, v, 0.8 * one, 0.6 * one, 0.7 * one, 0.96 * one)
    >>> round(float(d.mean[0, 0]), 4), round(float(d.std), 6)
    (0.6305, 0.626099)
    """
    return euler_maruyama(x, velocity, sigma, sigma_next, diffusion(sigma, noise_level, sigma_ceiling))


class FlowSde(Sampler):
    config: Config

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        require_flow(process, "flow_sde")
        return flow_sde_step(x, prediction.velocity, step.sigma, step.sigma_next, step.noise_level, step.sigma_ceiling)

    def velocity_gain(self, step: Step) -> Tensor:
        g = diffusion(step.sigma, step.noise_level, step.sigma_ceiling)
        return euler_maruyama_gain(step.sigma, step.sigma_next, g)


def build(config: Config) -> FlowSde:
    return FlowSde(config)
