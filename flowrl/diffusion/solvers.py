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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import ddim_mean, expand
from flowrl.diffusion.sa_solver import SaSolver
from flowrl.diffusion.solver_base import Node, Solver, log_snr, span

SolverName = Literal["ode", "dpm1", "dpm2_midpoint", "dpm2_heun", "sa"]


class Ode(Solver):
    """The plain step of the ODE."""

    def step(
        self, prediction: Prediction, here: Node, before: Node | None, *, last: bool = False
    ) -> tuple[Tensor, Node]:
        return ddim_mean(prediction, here.step, here.step.sigma_next), here


@dataclass(frozen=True, slots=True)
class Dpm(Solver):
    """DPM-Solver++ in data prediction."""

    weight: Callable[[Tensor, Tensor], Tensor] | None = None
    """Weight of D1 / alpha' from 1 - e^-H and H, [B] float64 each; None: order 1."""

    @property
    def order(self) -> int:
        return 1 if self.weight is None else 2

    def step(
        self, prediction: Prediction, here: Node, before: Node | None, *, last: bool = False
    ) -> tuple[Tensor, Node]:
        ahead = _dpm(here.x, here.x0_hat, here.step)
        if self.weight is not None and before is not None and not last:
            ahead = ahead + _correction(self.weight, here, before)
        return ahead, here


def _dpm(x: Tensor, x0_hat: Tensor, step: Step) -> Tensor:
    """The order 1 step; on the flow x 1, v 0.5 from sigma 0.8 to 0.6 gives 0.9.

    >>> s, s_next, any_ = torch.tensor([0.8]), torch.tensor([0.6]), torch.zeros(1)
    >>> step = Step(1 - s, s, 1 - s_next, s_next, any_, any_, any_, any_)
    >>> round(float(_dpm(torch.ones(1, 1), torch.full((1, 1), 0.6), step)), 6)
    0.9
    """
    h = span(step)
    keep = step.sigma_next.double() / step.sigma.double()
    take = -step.alpha_next.double() * torch.expm1(-h)
    return expand(keep.float(), x) * x.float() + expand(take.float(), x0_hat) * x0_hat


def _correction(weight: Callable[[Tensor, Tensor], Tensor], here: Node, before: Node) -> Tensor:
    """The addition of order 2, [B, ...]."""
    step = here.step
    h = span(step)
    back = log_snr(step.alpha, step.sigma) - log_snr(before.step.alpha, before.step.sigma)
    gain = step.alpha_next.double() * weight(-torch.expm1(-h), h) * h / back
    # Infinite H: the last node (sigma' = 0), where the gain would be infinite and order 1 is exact.
    gain = torch.where(h.isfinite(), gain, 0.0)
    return expand(gain.float(), here.x0_hat) * (here.x0_hat - before.x0_hat)


SOLVERS: dict[SolverName, Solver] = {
    "ode": Ode(),
    "dpm1": Dpm(),
    "dpm2_midpoint": Dpm(lambda gone, h: gone / 2),
    "dpm2_heun": Dpm(lambda gone, h: 1 - gone / h),
    "sa": SaSolver(),
}
