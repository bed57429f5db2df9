"""Deterministic steps: the plain ODE step, and DPM-Solver++ in data prediction with one or two nodes.

With lambda = ln alpha - ln sigma, H = lambda' - lambda, H_prev = lambda - lambda_prev, m0 = x0_hat here,
m1 = x0_hat at the node before, D1 = (m0 - m1) H / H_prev:

    ode            x' = alpha' x0_hat + sigma' eps_hat            (Euler on a flow, DDIM on VP)
    dpm1           x' = (sigma' / sigma) x + alpha' (1 - e^-H) m0               (the same map)
    dpm2_midpoint  dpm1 + alpha' (1 - e^-H) / 2 * D1
    dpm2_heun      dpm1 + alpha' (1 - (1 - e^-H) / H) * D1

Order 2 falls back to order 1 where there is no node before, where the node before is at sigma = 1 (H_prev
is infinite, so D1 = 0) and on the last step (at sigma' = 0 every order 1 step is x' = x0_hat exactly).
The published rule for fewer than 15 steps bounds the last but one step by order 2: nothing here exceeds it.

Source: arXiv 2211.01095; Tencent-Hunyuan/MixGRPO:fastvideo/utils/sampling_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import Process, euler_mean, expand

Solver = Literal["ode", "dpm1", "dpm2_midpoint", "dpm2_heun", "sa"]
"""`sa` is the stochastic one: flowrl/diffusion/sa_solver.py."""


@dataclass(frozen=True, slots=True)
class History:
    """What order 2 knows of the node before, whether its step was stochastic or not."""

    x0_hat: Tensor
    """[B, ...] float32."""
    lam: Tensor
    """ln alpha - ln sigma, [B] float64; -inf at pure noise."""

    @staticmethod
    def of(prediction: Prediction, step: Step) -> History:
        return History(prediction.x0_hat, _lam(step.alpha, step.sigma))

    def at(self, rows: Tensor) -> History:
        """Of `rows` [n], where several chains come from one place."""
        return History(self.x0_hat[rows], self.lam[rows])


def solve(
    solver: Solver, process: Process, prediction: Prediction, x: Tensor, step: Step, history: History | None
) -> Tensor:
    """Next latents of a deterministic step from x [B, ...], float32; `history` None: order 1, as on a last step."""
    if solver == "ode":
        return euler_mean(process, prediction, step)
    first = _dpm(x, prediction.x0_hat, step)
    if solver == "dpm1" or history is None:
        return first
    return first + _correction(solver, prediction.x0_hat, step, history)


def _dpm(x: Tensor, x0_hat: Tensor, step: Step) -> Tensor:
    """The order 1 step; on the flow x 1, v 0.5 from sigma 0.8 to 0.6 gives 0.9.

    >>> s, s_next, any_ = torch.tensor([0.8]), torch.tensor([0.6]), torch.zeros(1)
    >>> step = Step(1 - s, s, 1 - s_next, s_next, any_, any_, any_, any_)
    >>> round(float(_dpm(torch.ones(1, 1), torch.full((1, 1), 0.6), step)), 6)
    0.9
    """
    h = _lam(step.alpha_next, step.sigma_next) - _lam(step.alpha, step.sigma)
    keep = step.sigma_next.double() / step.sigma.double()
    take = -step.alpha_next.double() * torch.expm1(-h)
    return expand(keep.float(), x) * x.float() + expand(take.float(), x0_hat) * x0_hat


def _correction(solver: Solver, x0_hat: Tensor, step: Step, history: History) -> Tensor:
    """What order 2 adds."""
    lam = _lam(step.alpha, step.sigma)
    h = _lam(step.alpha_next, step.sigma_next) - lam
    gone = -torch.expm1(-h)
    factor = gone / 2 if solver == "dpm2_midpoint" else 1 - gone / h
    weight = step.alpha_next.double() * factor * h / (lam - history.lam)
    # Infinite H: the last node (sigma' = 0), where the weight would be infinite and order 1 is exact.
    weight = torch.where(h.isfinite(), weight, 0.0)
    return expand(weight.float(), x0_hat) * (x0_hat - history.x0_hat)


def _lam(alpha: Tensor, sigma: Tensor) -> Tensor:
    return alpha.double().log() - sigma.double().log()
