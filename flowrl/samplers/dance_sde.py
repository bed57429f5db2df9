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

from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Step
from flowrl.samplers.base import FlowSampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    eta: float = 0.3
    """Constant noise strength g, dimensionless; 0 is the Euler step."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta={self.eta} must not be negative")


class DanceSde(FlowSampler):
    noise_key = "eta"
    clip_ranges = (("mean", "plain", 1e-4), ("mean", "ratio_norm", 2e-6))

    def diffusion(self, step: Step) -> Tensor:
        return step.noise_level


build = DanceSde
