"""The plain ODE step, DPM-Solver++ in data prediction with one or two nodes, and the stochastic SA-Solver.

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
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import OptionError
from flowrl.core.tensors import floats
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import ddim_mean, expand
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solver_base import Node, Solver, log_snr, span


def sa_schedule(schedule: Schedule) -> Schedule:
    """The grid that the solver walks: it starts below pure noise and its last step before 0 is shorter.

    sigma_0 becomes 0.999 at most, the last sigma above 0 half of the one before it.

    Raises ValueError: the grid has fewer than 3 steps, does not end at 0, or is known at its own nodes only.
    """
    if len(schedule) < 3 or float(schedule.sigmas[-1]) != 0:
        raise OptionError(
            f"the SA-Solver needs a grid of at least 3 steps that ends at sigma 0; this one has {len(schedule)} and "
            f"ends at {float(schedule.sigmas[-1]):.3g}",
            {"algorithm.solver": "ode", "algorithm.solver_noise": 0.0},
        )
    sigmas = schedule.sigmas.clone()
    sigmas[0] = sigmas[0].clamp(max=0.999)
    sigmas[-2] = sigmas[-3] / 2
    return Schedule(sigmas, schedule.timestep_at(sigmas[:-1]))


def noise_levels(schedule: Schedule, noise_level: float, low: float = 0.3, high: float = 0.9) -> tuple[float, ...]:
    """tau of every step: `noise_level` where it starts at a sigma in [low, high], else 0."""
    return tuple(noise_level if low <= sigma <= high else 0.0 for sigma in floats(schedule.sigmas[:-1]))


class SaSolver(Solver):
    """The SA-Solver of the diffusion SDE, order 2 with a corrector, for rollouts that need no log-prob.

    With tau the noise level of a step (0 is the ODE), q = 1 + tau^2 and
    F(m) = e^(-tau^2 H) (sigma' / sigma) x + alpha' (1 - e^(-qH)) m + sigma' sqrt(1 - e^(-2 tau^2 H)) xi:

        predict   x' = F(m0) + q alpha' H^2 / 2 (m0 - m1) / (lambda - lambda_1)      m1 one node before
        correct   x  = F(m0 of the node before) + q alpha H / 2 (m - m0)             m = x0_hat at the predicted x

    The corrector replaces x by a better one, with the predictor's own noise, once the network has seen the predicted x:
    one evaluation per step. The first step is of order 1 and is not corrected; the last returns x0_hat, without noise.

    Source: arXiv 2309.05019 (with its replacement of the exact order-2 coefficients); the settings are those of
    scxue/advantage_weighted_matching.
    """

    stochastic = True
    least_steps = 3

    @property
    def order(self) -> int:
        return 2

    def grid(self, schedule: Schedule) -> Schedule:
        return sa_schedule(schedule)

    def noise_levels(self, schedule: Schedule, noise_level: float) -> tuple[float, ...]:
        return noise_levels(schedule, noise_level)

    def step(
        self, prediction: Prediction, here: Node, before: Node | None, *, last: bool = False
    ) -> tuple[Tensor, Node]:
        """One step from the predicted latents `here.x`, after they are corrected; see `Solver.step`."""
        if before is not None and before.noise is None:  # a step by another rule has nothing to correct
            before = None
        x, m0, step = here.x, here.x0_hat, here.step
        if before is not None and not before.first:
            gain = _gain(before.step) * span(before.step) / 2
            x = _first_order(before) + expand(gain.float(), x) * (m0 - before.x0_hat)
        left = replace(here, x=x, first=before is None)
        if last:
            return m0, left
        ahead = _first_order(left)
        if before is not None:
            gain = _gain(step) * span(step).square() / 2 / span(before.step)
            ahead = ahead + expand(gain.float(), x) * (m0 - before.x0_hat)
        return ahead, left


def _first_order(node: Node) -> Tensor:
    """F(m0)."""
    x, step = node.x, node.step
    assert node.noise is not None
    tau2, h = step.noise_level.double().square(), span(step)
    keep = (-tau2 * h).exp() * step.sigma_next.double() / step.sigma.double()
    take = -step.alpha_next.double() * torch.expm1(-(1 + tau2) * h)
    std = step.sigma_next.double() * (-torch.expm1(-2 * tau2 * h)).sqrt()
    ahead = expand(keep.float(), x) * x.float() + expand(take.float(), x) * node.x0_hat
    return ahead + expand(std.float(), x) * node.noise


def _gain(step: Step) -> Tensor:
    """q alpha', [B] float64."""
    return (1 + step.noise_level.double().square()) * step.alpha_next.double()


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
