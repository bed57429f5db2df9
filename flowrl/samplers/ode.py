"""The deterministic step: x' = alpha' x0_hat + sigma' eps_hat (Euler on a flow, DDIM on VP).

No singular points; no density, so its steps are never trained by methods with log-probs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process, euler_mean
from flowrl.samplers.base import Sampler, StepDistribution, ddim_gain

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


class Ode(Sampler):
    order = 1

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        return StepDistribution(mean=euler_mean(process, prediction, step), std=torch.zeros_like(step.sigma))

    def velocity_gain(self, step: Step) -> Tensor:
        return ddim_gain(step, step.sigma_next)

    def default_noise_level(self) -> float:
        return 0.0


build = Ode
