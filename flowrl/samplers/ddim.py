"""DDIM with eta, on any path: x' = alpha' x0_hat + sqrt(sigma'^2 - std^2) eps_hat + std z.

    std = eta * sigma' * sqrt(1 - r^2),   r = sigma' alpha / (sigma alpha')

r is the noise-to-signal ratio after the step over the one before. On VP this is the published step
(arXiv 2010.02502, eq. 16): std^2 = eta^2 (1 - abar') / (1 - abar) * (1 - abar / abar'). eta 0 is
deterministic, eta 1 ancestral. On a flow it is, to first order in the step, the SDE with
g^2 = 2 eta^2 sigma / (1 - sigma): eta 1 is memoryless, eta = a / sqrt(2) has the noise of Flow-SDE, and
neither needs a bound at sigma = 1.

Singular points: none on a flow (at sigma = 1, r = 0 and std = eta sigma'). On VP alpha = 0 (terminal
SNR 0), where eps_hat of an eps model is undefined. Where sigma' = 0, std is 0.
Log-prob form: mean over dims.

Source: arXiv 2010.02502; kvablack/ddpo-pytorch:ddpo_pytorch/diffusers_patch/ddim_with_logprob.py. On a
flow no official code: the same Gaussian written with alpha = 1 - sigma.
"""

from dataclasses import dataclass

from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process, VPProcess, ddim_mean
from flowrl.samplers.base import Sampler, StepDistribution, ddim_gain

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    eta: float = 1.0
    """Noise of a stochastic step, dimensionless, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta={self.eta} must be in [0, 1]")


def noise_ratio(step: Step) -> Tensor:
    """r, [B]."""
    return step.sigma_next * step.alpha / (step.sigma * step.alpha_next)


def any_path_std(step: Step) -> Tensor:
    """std on any path, [B].

    >>> from flowrl.diffusion.process import FlowProcess
    >>> from flowrl.diffusion.plan import StepPlan
    >>> from flowrl.diffusion.schedules import Schedule
    >>> import torch
    >>> grid = Schedule(sigmas=torch.tensor([1.0, 0.5, 0.0]), timesteps=torch.tensor([1000.0, 500.0]))
    >>> any_path_std(StepPlan(grid, (1.0, 1.0), ()).steps(torch.arange(2), FlowProcess())).tolist()
    [0.5, 0.0]
    """
    return step.noise_level * step.sigma_next * (1 - noise_ratio(step).square()).clamp(min=0).sqrt()


def vp_std(step: Step) -> Tensor:
    """std on VP as published, where alpha^2 + sigma^2 = 1 removes one sigma from the root, [B]."""
    ratio = (1 - (step.alpha / step.alpha_next).square()).clamp(min=0).sqrt()
    return step.noise_level * step.sigma_next / step.sigma * ratio


def direction(step: Step) -> Tensor:
    """Weight of eps_hat in the mean, [B]: sqrt(sigma'^2 - std^2), without its cancellation next to pure noise."""
    eta = step.noise_level
    return step.sigma_next * ((1 - eta) * (1 + eta) + (eta * noise_ratio(step)).square()).clamp(min=0).sqrt()


class Ddim(Sampler):
    clip_ranges = (("mean", "plain", 1e-4),)
    noise_key = "eta"
    largest = 1.0
    order = 1

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        std = vp_std(step) if isinstance(process, VPProcess) else any_path_std(step)
        return StepDistribution(mean=ddim_mean(prediction, step, direction(step)), std=std)

    def velocity_gain(self, step: Step) -> Tensor:
        return ddim_gain(step, direction(step))


build = Ddim
