"""CPS, coefficients-preserving sampling: a share of the noise is redrawn, its total stays sigma'.

With a = noise_level in [0, 1]:

    mean = alpha' x0_hat + sigma' cos(a pi / 2) eps_hat
    std  = sigma' sin(a pi / 2)

a = 0 is the deterministic step, a = 1 redraws all noise (the step of consistency models). Singular
points: none. Where sigma' = 0, std is 0: x' = x0_hat, which cannot be scored or trained.

The share does not shrink with the step, so the data's marginal is lost on fine grids (the final std of
Gaussian data tends to cos(a pi / 4) of the true one): a sampler for few steps.

Log-prob form: unscaled, -mean of (x' - mean)^2. The official code drops 1 / (2 std^2) with the
constants, and its clip ranges (1e-5) belong to that form.

Source: arXiv 2509.05952; IamCreateAI/FlowCPS:flow_grpo/diffusers_patch/sd3_sde_with_logprob.py.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process, ddim_mean
from flowrl.samplers.base import Sampler, StepDistribution, ddim_gain

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    noise_level: float = 0.8
    """Share a of the noise that a step redraws, dimensionless, in [0, 1]; 0 is the Euler step."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level <= 1:
            raise ValueError(f"noise_level={self.noise_level} must be in [0, 1]")


def direction(step: Step) -> Tensor:
    """Weight of eps_hat in the mean, [B]."""
    # cos(pi / 2) rounds to -4e-8.
    return step.sigma_next * (step.noise_level * (math.pi / 2)).cos().clamp(min=0)


class Cps(Sampler):
    log_prob_form = "unscaled"
    kl_divisor = "variance"
    clip_ranges = (("unscaled", "plain", 1e-5),)
    largest = 1.0
    order = 0  # the redrawn share does not shrink with the step

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        std = step.sigma_next * (step.noise_level * (math.pi / 2)).sin()
        return StepDistribution(mean=ddim_mean(prediction, step, direction(step)), std=std)

    def velocity_gain(self, step: Step) -> Tensor:
        return ddim_gain(step, direction(step))


build = Cps
