"""Memoryless SDE: the noise at which the final sample forgets its initial noise (Adjoint Matching).

    g^2 = eta^2 * 2 sigma / (1 - bound)

with `bound` as in Flow-SDE; eta = 1 is the memoryless schedule. The step is the Euler-Maruyama step of
`flow_sde` with noise_level = sqrt(2) * eta: one law in another unit, the one that DDIM's eta is in.

Singular point: 1 - sigma at sigma = 1, bounded there by the grid's second sigma (`Step.sigma_ceiling`)
and by nothing elsewhere. At sigma = 1 and eta = 1 this gives std sqrt(2) and a mean of velocity * dt:
x is forgotten at once, but its variance doubles, and only later steps remove that. `ddim` with eta = 1
is the same SDE to first order and does not overshoot. Log-prob form: mean over dims.

Source: arXiv 2409.08861; microsoft/soc-fine-tuning-sd (which takes DDIM with eta = 1 on SD1.5; its
paper's offset of sigma by one grid step is not taken over: it biases the mean).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process
from flowrl.samplers.base import Sampler, StepDistribution, euler_maruyama, euler_maruyama_gain, require_flow
from flowrl.samplers.flow_sde import diffusion as flow_sde_diffusion

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    eta: float = 1.0
    """Multiple of the memoryless noise, dimensionless; 1 is memoryless, 0 is the Euler step."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta={self.eta} must not be negative")


def diffusion(step: Step) -> Tensor:
    """g of the law above, [B]. Raises as that of `flow_sde` does."""
    return flow_sde_diffusion(step.sigma, math.sqrt(2) * step.noise_level, step.sigma_ceiling)


class Memoryless(Sampler):
    noise_key = "eta"
    config: Config

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        require_flow(process, "memoryless")
        return euler_maruyama(x, prediction.velocity, step.sigma, step.sigma_next, diffusion(step))

    def velocity_gain(self, step: Step) -> Tensor:
        return euler_maruyama_gain(step.sigma, step.sigma_next, diffusion(step))

    def default_noise_level(self) -> float:
        return self.config.eta


def build(config: Config) -> Memoryless:
    return Memoryless(config)
