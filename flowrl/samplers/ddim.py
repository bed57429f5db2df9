"""DDIM with eta: x' = alpha' x0_hat + sqrt(sigma'^2 - std^2) eps_hat + std z.

    std = eta * (sigma' / sigma) * sqrt(1 - (alpha / alpha')^2)     (variance preserving path)

For VP models this is the published step (arXiv 2010.02502, eq. 16): std^2 = eta^2 (1 - abar') / (1 - abar)
* (1 - abar / abar'). eta 0 is deterministic, eta 1 ancestral. Flow paths are refused: their law is
another one. Singular point: alpha = 0 (terminal SNR 0), where eps_hat of an eps model is undefined.
Log-prob form: mean over dims. The last step has std 0 where sigma' = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.process import Process, VPProcess, expand
from flowrl.samplers.base import LogProbForm, StepDistribution
from flowrl.types import Prediction, Step

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    eta: float = 1.0
    """Noise of a stochastic step, dimensionless, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta={self.eta} must lie in [0, 1]")


@dataclass(frozen=True, slots=True)
class Ddim:
    config: Config
    log_prob_form: LogProbForm = "mean"

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        if not isinstance(process, VPProcess):
            raise ValueError("sampler 'ddim' needs a noise-prediction (VP) model; use 'flow_sde' on a flow model")
        ratio = (1 - (step.alpha / step.alpha_next).square()).clamp(min=0).sqrt()
        std = step.noise_level * step.sigma_next / step.sigma * ratio
        direction = (step.sigma_next.square() - std.square()).clamp(min=0).sqrt()
        mean = expand(step.alpha_next, x) * prediction.x0_hat + expand(direction, x) * prediction.eps_hat
        return StepDistribution(mean=mean, std=std)

    def default_noise_level(self) -> float:
        return self.config.eta


def build(config: Config) -> Ddim:
    return Ddim(config)
