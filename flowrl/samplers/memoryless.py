"""Memoryless SDE: the noise at which the final sample forgets its initial noise (Adjoint Matching).

    g^2 = eta^2 * 2 sigma / (1 - bound)

with `bound` as in Flow-SDE; eta = 1 is the memoryless schedule. The step is the Euler-Maruyama step of
`flow_sde` with noise_level = sqrt(2) * eta: the same transition in the unit of DDIM's eta.

Singular point: 1 - sigma at sigma = 1, bounded there by the grid's second sigma (`Step.sigma_ceiling`)
and by nothing elsewhere. At sigma = 1 and eta = 1 this gives std sqrt(2) and a mean of velocity * dt:
x is forgotten at once, but its variance doubles, and only later steps remove that. `ddim` with eta = 1
is the same SDE to first order and does not overshoot. Log-prob form: mean over dims.

Source: arXiv 2409.08861; microsoft/soc-fine-tuning-sd (which takes DDIM with eta = 1 on SD1.5; its
paper's offset of sigma by one grid step is not taken over: it biases the mean).
"""

import math
from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Step
from flowrl.samplers.base import FlowSampler
from flowrl.samplers.flow_sde import flow_sde_diffusion

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config:
    eta: float = 1.0
    """Multiple of the memoryless noise, dimensionless; 1 is memoryless, 0 is the Euler step."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta={self.eta} must not be negative")


class Memoryless(FlowSampler):
    noise_key = "eta"

    def diffusion(self, step: Step) -> Tensor:
        return flow_sde_diffusion(step, math.sqrt(2) * step.noise_level)


build = Memoryless
