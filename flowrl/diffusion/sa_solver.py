"""SA-Solver: a stochastic solver of the diffusion SDE, order 2 with a corrector, for rollouts that need no log-prob.

With lambda = ln alpha - ln sigma, H = lambda' - lambda, tau the noise (0 is the ODE), q = 1 + tau^2 and
F(m) = e^(-tau^2 H) (sigma' / sigma) x + alpha' (1 - e^(-qH)) m + sigma' sqrt(1 - e^(-2 tau^2 H)) xi:

    predict   x' = F(m0) + q alpha' H^2 / 2 (m0 - m1) / (lambda - lambda_1)      m0 = x0_hat here, m1 one node before
    correct   x  = F(m0 of the node before) + q alpha H / 2 (m - m0)             m = x0_hat at the predicted x

The corrector replaces x by a better one, with the predictor's own noise, once the network has seen the predicted x:
one evaluation per step. The first step is of order 1 and is not corrected; the last returns x0_hat, so without noise.

Source: arXiv 2309.05019 (with its replacement of the exact order-2 coefficients); the settings are those of
scxue/advantage_weighted_matching.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.core.errors import OptionError
from flowrl.core.tensors import floats
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import expand
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solver_base import Node, Solver, span


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
    """The SA-Solver; the noise level of a step is its tau."""

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
