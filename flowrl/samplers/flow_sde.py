"""Flow-SDE: the Euler-Maruyama step of the SDE that keeps a flow's marginals (Flow-GRPO).

With g = noise_level * sqrt(sigma / (1 - bound)), dt = sigma_next - sigma < 0:

    mean = x + (velocity + g^2 / (2 sigma) * eps_hat) * dt
    std  = g * sqrt(-dt)

Singular point: 1 - sigma at sigma = 1. There `bound` is the grid's second sigma (`Step.sigma_ceiling`),
as in the official code, and sigma elsewhere. At sigma = 1 the std is then exactly noise_level.
Log-prob form: mean over dims.

Source: arXiv 2505.05470; yifan123/flow_grpo:flow_grpo/diffusers_patch/sd3_sde_with_logprob.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import Step
from flowrl.samplers.base import FlowSampler, NoiseOptions

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(NoiseOptions):
    noise_level: float = 0.7
    """Strength a of the noise, dimensionless; 0 is the Euler step."""


def flow_sde_diffusion(step: Step, noise_level: Tensor) -> Tensor:
    """g of each step, [B], at noise levels [B].

    Raises ValueError: sigma is 1 and so is sigma_ceiling; g diverges there.
    """
    if bool((_bound(step.on_cpu) >= 1).any()):
        raise ValueError("the Flow-SDE diverges at sigma = 1; pass the grid's second sigma as sigma_ceiling")
    return noise_level * (step.sigma / (1 - _bound(step))).sqrt()


def _bound(step: Step) -> Tensor:
    return torch.where(step.sigma >= 1, step.sigma_ceiling, step.sigma)


class FlowSde(FlowSampler):
    clip_ranges = (("mean", "plain", 1e-4), ("mean", "ratio_norm", 2e-6))

    def diffusion(self, step: Step) -> Tensor:
        return flow_sde_diffusion(step, step.noise_level)


build = FlowSde
