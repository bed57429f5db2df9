"""Dance-SDE: the Euler-Maruyama step with the same noise strength at every sigma (DanceGRPO).

With g = eta, dt = sigma_next - sigma < 0:

    mean = x + (velocity + eta^2 / (2 sigma) * eps_hat) * dt
    std  = eta * sqrt(-dt)

Singular point: sigma -> 0, where the drift's 1 / sigma grows without bound. Every step of a grid starts
above 0 and is finite, but a noisy last step from a low sigma is not small: from 0.0089, on data much
sharper than that, it multiplies x by about -5. Keep the last step deterministic. Nothing happens at
sigma = 1. Log-prob form: mean over dims.

Source: arXiv 2505.07818; XueZeyue/DanceGRPO:fastvideo/train_grpo_flux.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process
from flowrl.samplers.base import Sampler, StepDistribution, euler_maruyama, euler_maruyama_gain, require_flow

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    eta: float = 0.3
    """Constant noise strength g, dimensionless; 0 is the Euler step."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta={self.eta} must not be negative")


class DanceSde(Sampler):
    noise_key = "eta"
    config: Config

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        require_flow(process, "dance_sde")
        return euler_maruyama(x, prediction.velocity, step.sigma, step.sigma_next, step.noise_level)

    def velocity_gain(self, step: Step) -> Tensor:
        return euler_maruyama_gain(step.sigma, step.sigma_next, step.noise_level)

    def default_noise_level(self) -> float:
        return self.config.eta


def build(config: Config) -> DanceSde:
    return DanceSde(config)
