"""Precise-SDE: the reverse SDE integrated exactly over a step, with the clean prediction and the noise held.

With r = sigma' alpha / (sigma alpha'), the noise-to-signal ratio after the step over the one before, and eta >= 0:

    kept = r^(eta^2)                                      `schedule: flow`, the SDE of Flow-SDE
    kept = exp(-eta^2 (alpha' / sigma' - alpha / sigma))  `schedule: dance`, that of Dance-SDE
    mean = alpha' x0_hat + sigma' sqrt(kept) eps_hat
    std  = sigma' sqrt(1 - kept)

eta 0 is the deterministic step, eta sqrt(2) DDIM's eta 1, and as the step shrinks the first is Flow-SDE's step of that
noise level, the second Dance-SDE's. Both coefficients are the path's own for any step, so that no noise is added beyond
what sigma' has. Singular points: none; at sigma = 1, std is sigma'. Where sigma' = 0, std is 0: x' = x0_hat, which
cannot be scored or trained (the official code bounds std by 1e-6 there). Log-prob form: mean over dims.

Source: arXiv 2605.23522; Tencent-Hunyuan/Precise:precise_sde/diffusers_patch/sde_with_logprob.py (eta 1.5 and the clip
range of the normalised ratio; that of the plain ratio is Flow-SDE's, ours).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process, ddim_mean
from flowrl.samplers.base import Sampler, StepDistribution, ddim_gain
from flowrl.samplers.ddim import noise_ratio

LEVEL = "experimental"
_LEAST = 1e-30  # of sigma', where it divides: the exponential is 0 long before


@dataclass(frozen=True, kw_only=True)
class Config:
    eta: float = 1.5
    """Noise strength, dimensionless; 0 is the Euler step."""
    schedule: Literal["flow", "dance"] = "flow"
    """The SDE that is integrated: Flow-SDE's, or Dance-SDE's (published with 0.3)."""

    def __post_init__(self) -> None:
        if not self.eta >= 0:
            raise ValueError(f"eta={self.eta} must not be negative")


class Precise(Sampler):
    noise_key = "eta"
    clip_ranges = (("mean", "plain", 1e-4), ("mean", "ratio_norm", 4e-6))
    order = 1
    config: Config

    def kept(self, step: Step) -> Tensor:
        """Share of the variance sigma'^2 that is not drawn anew, [B] in [0, 1]."""
        strength = step.noise_level.square()
        if self.config.schedule == "flow":
            return noise_ratio(step).pow(strength)
        closer = step.alpha_next / step.sigma_next.clamp(min=_LEAST) - step.alpha / step.sigma
        return (-strength * closer).exp()

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        kept = self.kept(step)
        std = step.sigma_next * (1 - kept).clamp(min=0).sqrt()
        return StepDistribution(mean=ddim_mean(prediction, step, step.sigma_next * kept.sqrt()), std=std)

    def velocity_gain(self, step: Step) -> Tensor:
        return ddim_gain(step, step.sigma_next * self.kept(step).sqrt())


build = Precise
