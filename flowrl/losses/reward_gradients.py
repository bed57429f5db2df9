"""From the gradient of a reward at clean latents to gradients of the network at the steps of a rollout.

A deterministic step is linear in its latents and in the network's output there, x' = keep x + gain y(x), and so is the
jump from a step to the clean prediction. With a = dR/dx' after it:

    c = gain a                       dR/dtheta has the part (dy/dtheta)^T c
    a <- keep a + (dy/dx)^T c        dR/dx, for the step before; without the product (DRTune, ReFL) keep a

Source: arXiv 2309.17400 (DRaFT), 2304.05977 (ReFL), 2405.00760 (DRTune).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.tensors import floats
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import PredictionType, Process, euler_mean
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import GradientBatch, LossOutput, summed
from flowrl.losses.matching import mean_square

LEVER = 0.05
"""Least noise level of a step that is trained: below it the network moves the image by next to nothing."""


@dataclass(frozen=True, slots=True)
class Link:
    """The factors of a step, or of the jump from it to the clean prediction: x' = keep x + gain y(x)."""

    step: int
    keep: float
    gain: float


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a gradient in one iteration."""

    end: int
    """The step whose clean prediction ends the path: those after it are jumped."""
    trained: tuple[int, ...]
    """Steps whose network outputs carry gradient, `end` or before it."""


def levers(schedule: Schedule) -> int:
    """Steps of a grid that begin at a noise level of at least `LEVER`: 0 .. n - 1.

    >>> levers(Schedule(torch.tensor([1.0, 0.5, 0.001, 0.0]), torch.tensor([1000.0, 500.0, 1.0])))
    2
    """
    return int((schedule.sigmas[:-1] >= LEVER).sum())


def links(plan: StepPlan, process: Process, kind: PredictionType, route: Route) -> list[Link]:
    """The links of a route, late to early: the jump from its end, and every step down to the first trained one.

    `kind` is what the network's output is.
    """
    result: list[Link] = []
    for k in range(route.end, min(route.trained) - 1, -1):
        # Row 0 is x = 1 and y = 0, row 1 the other way round.
        x, y = torch.eye(2)[:, :, None].unbind()
        step = plan.steps(torch.tensor([k, k]), process)
        prediction = process.predict(y, x, step.sigma, kind, step.alpha)
        ahead = prediction.x0_hat if k == route.end else euler_mean(process, prediction, step)
        result.append(Link(k, *floats(ahead.flatten())))
    return result


def pulled_back(
    gradient: Tensor,
    links: Sequence[Link],
    trained: Collection[int],
    product: Callable[[int, Tensor], Tensor] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """(step, c [B, ...]) of the trained steps, late to early; a product is taken before its c is handed out.

    Args:
        gradient: dR/dx at the end of the first link, [B, ...].
        links: late to early.
        trained: their steps whose c is wanted.
        product: (step, c) -> (dy/dx)^T c there, [B, ...]; None leaves it out.

    >>> two = [Link(1, 1.0, -0.5), Link(0, 1.0, -0.5)]
    >>> [(k, float(c)) for k, c in pulled_back(torch.ones(1), two, (0, 1), lambda k, c: 3 * c)]
    [(1, -0.5), (0, 0.25)]
    """
    for place, link in enumerate(links):
        c, gradient = link.gain * gradient, link.keep * gradient
        if product is not None and place + 1 < len(links):
            gradient = gradient + product(link.step, c)
        if link.step in trained:
            yield link.step, c


def climbing(
    output: Tensor,
    batch: GradientBatch,
    reference: Tensor | None = None,
    pull: Callable[[Tensor, Tensor], Tensor] | None = None,
    share: float = 1.0,
) -> LossOutput:
    """Minus the sum of <c, y> for the network's output y [M, ...]: its gradient descends against the rewards'.

    With a reference's output there [M, ...] plus share * pull(mean_d (y - reference)^2 [M], sigma [M]).
    """
    c = batch.coefficient
    each, metrics = -(c * output.float()).flatten(1).sum(dim=1), dict(batch.metrics)
    if reference is not None and pull is not None:
        kl = metrics["policy/kl_reference"] = mean_square(output, reference)
        each = each + share * pull(kl, batch.step.sigma)
    per_step = {"reward_gradient/coefficient": c.square().flatten(1).sum(dim=1).sqrt()}
    return replace(summed(each, metrics), per_step=per_step)
