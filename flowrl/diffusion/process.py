"""Noise processes x = alpha * x0 + sigma * eps and the meaning of a network's output on them.

`FlowProcess` has alpha = 1 - sigma; `VPProcess` has alpha^2 + sigma^2 = 1. Every kernel and loss is
written against these two coefficients, never against a model. Computation is in float32.
"""

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from flowrl.core.types import Prediction, Step

PredictionType = Literal["velocity", "eps", "v", "x0"]


def expand(value: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, ...] to multiply `like` [B, ...]; the only broadcast in the code.

    Raises ValueError: `value` is not [B].

    >>> import torch
    >>> expand(torch.ones(2), torch.zeros(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    if value.ndim != 1 or len(value) != len(like):
        raise ValueError(f"expected one value per sample, shape [{len(like)}], got {tuple(value.shape)}")
    return value.reshape(-1, *[1] * (like.ndim - 1))


class Process(ABC):
    """A Gaussian path from data (sigma = 0) to noise."""

    @abstractmethod
    def alpha(self, sigma: Tensor) -> Tensor:
        """Signal coefficient that goes with `sigma`, same shape, float32."""

    @abstractmethod
    def velocity(self, x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        """The path's direction at sigma [B]: what a velocity network is trained to give, [B, ...]."""

    def add_noise(self, x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        """x at `sigma` [B]: alpha * x0 + sigma * eps, [B, ...] float32."""
        return expand(self.alpha(sigma), x0) * x0.float() + expand(sigma, x0) * eps.float()

    def target(self, x0: Tensor, eps: Tensor, sigma: Tensor, prediction_type: PredictionType) -> Tensor:
        """The exact output of a network of `prediction_type` for (x0, eps) at sigma [B], [B, ...]."""
        if prediction_type == "eps":
            return eps.float()
        if prediction_type == "x0":
            return x0.float()
        return self.velocity(x0.float(), eps.float(), sigma)

    @abstractmethod
    def predict(
        self, raw: Tensor, x: Tensor, sigma: Tensor, prediction_type: PredictionType, alpha: Tensor | None = None
    ) -> Prediction:
        """Network output `raw` [B, ...] at latents x [B, ...] and sigma [B] as (x0_hat, eps_hat, velocity).

        alpha [B] is the signal coefficient where it is known more exactly than from sigma: near sigma = 1 a float32
        sigma leaves VP's alpha = sqrt(1 - sigma^2) few digits.
        """


class FlowProcess(Process):
    """Rectified flow: x = (1 - sigma) x0 + sigma eps, velocity = eps - x0."""

    def alpha(self, sigma: Tensor) -> Tensor:
        return 1 - sigma.float()

    def velocity(self, x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        return eps - x0

    def predict(
        self, raw: Tensor, x: Tensor, sigma: Tensor, prediction_type: PredictionType, alpha: Tensor | None = None
    ) -> Prediction:
        if prediction_type != "velocity":
            raise ValueError(f"a flow network predicts 'velocity', not {prediction_type!r}")
        x, v = x.float(), raw.float()
        sigma = expand(sigma.float(), x)
        return Prediction(x0_hat=x - sigma * v, eps_hat=x + (1 - sigma) * v, velocity=v)


class VPProcess(Process):
    """Variance preserving: alpha = sqrt(alphas_cumprod), sigma = sqrt(1 - alphas_cumprod).

    `v` is alpha * eps - sigma * x0 (arXiv 2202.00512). At alpha = 0 (terminal SNR 0) `eps` does not determine
    x0: schedules that start there are refused for such networks.
    """

    def alpha(self, sigma: Tensor) -> Tensor:
        return (1 - sigma.float().square()).clamp(min=0).sqrt()

    def velocity(self, x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        return expand(self.alpha(sigma), x0) * eps - expand(sigma, x0) * x0

    def predict(
        self, raw: Tensor, x: Tensor, sigma: Tensor, prediction_type: PredictionType, alpha: Tensor | None = None
    ) -> Prediction:
        x, raw = x.float(), raw.float()
        alpha, sigma = expand(self.alpha(sigma) if alpha is None else alpha, x), expand(sigma.float(), x)
        if prediction_type == "eps":
            x0_hat, eps_hat = (x - sigma * raw) / alpha, raw
        elif prediction_type == "v":
            x0_hat, eps_hat = alpha * x - sigma * raw, sigma * x + alpha * raw
        elif prediction_type == "x0":
            x0_hat, eps_hat = raw, (x - alpha * raw) / sigma
        else:
            raise ValueError(f"a VP network predicts 'eps', 'v' or 'x0', not {prediction_type!r}")
        return Prediction(x0_hat=x0_hat, eps_hat=eps_hat, velocity=alpha * eps_hat - sigma * x0_hat)


def euler_mean(process: Process, prediction: Prediction, step: Step) -> Tensor:
    """alpha' x0_hat + sigma' eps_hat: the deterministic step (DDIM; for flows the Euler step), [B, ...]."""
    return ddim_mean(prediction, step, step.sigma_next)


def ddim_mean(prediction: Prediction, step: Step, direction: Tensor) -> Tensor:
    """alpha' x0_hat + direction * eps_hat, [B, ...]; direction [B] is sqrt(sigma'^2 - std^2)."""
    x0_hat = prediction.x0_hat
    return expand(step.alpha_next, x0_hat) * x0_hat + expand(direction, x0_hat) * prediction.eps_hat
