"""The order of convergence of samplers and solvers, measured on Gaussian data by halving the steps.

    x0 ~ N(m, s^2)                                x of a node ~ N(alpha m, V), V = alpha^2 s^2 + sigma^2
    x0_hat = m + alpha s^2 / V (x - alpha m)      eps_hat = (x - alpha x0_hat) / sigma

The probability-flow ODE, and every SDE that belongs to it, keeps these marginals. Steps are affine in x and in their
noise, so nothing is drawn: a mean, and what one unit of the start and of each step's noise adds to it, tell all.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flowrl.contracts.laws import Law, law, require
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import FlowProcess, PredictionType, Process, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solver_base import Node, Solver

PATHS: dict[str, tuple[Process, PredictionType]] = {"flow": (FlowProcess(), "velocity"), "vp": (VPProcess(), "eps")}
Advance: TypeAlias = Callable[[Process, Prediction, Tensor, Step, Tensor, Node | None], tuple[Tensor, Node | None]]
"""(process, prediction, x, step, noise, node before) -> (x at its end, the node that it leaves)."""

STEPS = 32
SPAN = (0.9, 0.1)
"""Sigmas between which steps are taken: away from both ends, where samplers have rules of their own."""
DATA = ((1.0, 0.5), (-0.5, 1.5), (0.3, 0.2))
"""(m, s): three, for the error of one may change its sign where it is measured."""
ROUNDING = 8 * torch.finfo(torch.float32).eps / 2
"""What a step adds to the error in float32: at most 8 roundings of numbers of the size of x; others are times |dt|."""


def exact(step: Step, x: Tensor, centre: float, spread: float) -> tuple[Tensor, Tensor]:
    """(x0_hat, eps_hat) of a perfect network for such data, both [B, 1] float64."""
    alpha, sigma = step.alpha.double()[:, None], step.sigma.double()[:, None]
    keep = alpha * spread**2 / ((alpha * spread).square() + sigma.square())
    x0_hat = centre + keep * (x.double() - alpha * centre)
    return x0_hat, (x.double() - alpha * x0_hat) / sigma


def error(advance: Advance, path: str, num_steps: int, level: float, data: tuple[float, float]) -> float:
    """Largest error of the mean, and relative error of the std, at any node of so many steps at a noise level."""
    (process, kind), (centre, spread) = PATHS[path], data
    sigmas = torch.linspace(*SPAN, num_steps + 1)
    plan = StepPlan(Schedule(sigmas, 1000 * sigmas[:-1]), (level,) * num_steps, ())
    steps, rows = plan.steps(torch.arange(num_steps), process), num_steps + 2
    mean = steps.alpha_next.double() * centre
    std = torch.hypot(steps.alpha_next.double() * spread, steps.sigma_next.double())
    # Row 0 is the mean; row 1 starts one std beside it; row 2 + k has one unit of noise in step k.
    x = (steps.alpha[0] * centre).repeat(rows, 1)
    x[1] += torch.hypot(steps.alpha[0] * spread, steps.sigma[0])
    worst, before = 0.0, None
    for k in range(num_steps):
        step, noise = steps.at(torch.full((rows,), k)), torch.zeros(rows, 1)
        noise[2 + k] = 1.0
        x0_hat, eps_hat = exact(step, x, centre, spread)
        raw = process.velocity(x0_hat, eps_hat, step.sigma) if kind == "velocity" else eps_hat
        x, before = advance(process, process.predict(raw, x, step.sigma, kind), x, step, noise, before)
        found = (x[1:] - x[0]).double().norm()
        worst = max(worst, float((x[0, 0] - mean[k]).abs()), float((found / std[k] - 1).abs()))
    return worst


def measured(advance: Advance, path: str, level: float) -> float:
    """The order that halving the steps shows, with all that rounding may hide in its favour; infinite where exact."""
    coarse, fine = (max(error(advance, path, n, level, data) for data in DATA) for n in (STEPS, 2 * STEPS))
    coarse, fine = coarse + ROUNDING * STEPS, fine - ROUNDING * 2 * STEPS
    return math.log2(coarse / fine) if fine > 0 else math.inf


def require_order(order: int, advance: Advance, path: str, level: float) -> str:
    """What was measured, such as "1.0 on flow"; raises Broken where it does not round to `order` or more."""
    found = measured(advance, path, level)
    require(
        found > order - 0.5,
        f"it declares order {order}, and half the step divides its error by {2**found:.2f}, which is order "
        f"{found:.1f}, on {path} at noise level {level:g}",
        f"order = {max(round(found), 0)}, or a mean and std that keep the marginals: of x0 ~ N(m, s^2) the mean "
        "alpha' m and the variance alpha'^2 s^2 + sigma'^2",
    )
    return f"{found:.1f} on {path}"


@law("order", "halving the steps divides the error on Gaussian data by 2^order, or more")
def solver_order(solver: Solver) -> str:
    def advance(
        process: Process, prediction: Prediction, x: Tensor, step: Step, noise: Tensor, before: Node | None
    ) -> tuple[Tensor, Node | None]:
        return solver.step(prediction, Node(x, prediction.x0_hat, step, noise if solver.stochastic else None), before)

    levels = (0.0, 1.0) if solver.stochastic else (0.0,)
    found = [require_order(solver.order, advance, path, level) for path in PATHS for level in levels]
    return f"order {solver.order}; measured {', '.join(found)}"


SOLVER_LAWS: tuple[Law[Solver], ...] = (solver_order,)
