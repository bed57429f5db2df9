"""From the gradient of a reward at clean latents to gradients of the network at the steps of a rollout.

A step is linear in its latents and in the network's output there, x' = keep x + gain y(x), if its noise is given, and
so is the jump from a step to the clean prediction. With a = dR/dx' after it:

    c = gain a                            dR/dtheta has the part (dy/dtheta)^T c
    a <- keep a + through (dy/dx)^T c     dR/dx, for the step before; `through` 0 leaves the product out

A leap from step a to a place b is such a step over several: x_b = keep x_a + sum of gain_i y_i over its supports i, by
the integral of the polynomial through the outputs there (flows: of v over sigma; VP: of eps over sigma / alpha). One
support, the start, is the long Euler step.

Source: arXiv 2309.17400 (DRaFT), 2304.05977 (ReFL), 2405.00760 (DRTune), 2604.15311 (LeapAlign), 2606.11075 (FlowBP),
2509.06942 (SRPO), 2511.21541 (PRFL).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from flowrl.core.tensors import floats
from flowrl.core.types import Kept, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import FlowProcess, PredictionType, Process, euler_mean, expand
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import GradientBatch, LossOutput, summed
from flowrl.losses.matching import mean_square
from flowrl.samplers.base import Sampler

LEVER = 0.05
"""Least noise level of a step that is trained: below it the network moves the image by next to nothing."""
SIDE = 0.25
"""Factor on the gradient of a leap's trained supports but its start."""


@dataclass(frozen=True, slots=True)
class Link:
    """The factors of a step, or of a leap's support: x' = keep x + gain y(x)."""

    step: int
    keep: float
    gain: float
    through: float = 0.0
    """Share of the gradient that goes on through the network's input; 0: it is detached."""


Wordings = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Samples noised by the noise that they began with, taken one step on, and freed of what is left of it."""

    start: float
    """Noise level of the step, as of a flow."""
    end: float
    """That after it: below `start` it denoises, above it inverts."""
    readings: Wordings
    """Rewards count as the sum of factor * value under the prompt in these words."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a gradient in one iteration."""

    end: int
    """The step whose clean prediction ends the path: those after it are jumped."""
    trained: tuple[int, ...]
    """Steps whose network outputs carry gradient, `end` or before it."""
    through: tuple[int, ...] = ()
    """Trained steps whose network's input carries gradient to earlier ones."""
    rho: float = 1.0
    """The share of it that does."""
    leaps: tuple[tuple[int, ...], ...] = ()
    """Supports of each leap, its start first; the last leap first, which ends at clean latents, each other at the start
    of the one after it. Empty: every step is one."""
    rescale: float = 0.0
    """r: trained gains are multiplied by 1 + r (sum of all |gain| over that of the trained - 1), of the whole route or,
    where there are leaps, of each."""
    noised: bool = False
    """Finished samples are noised again to each of `trained`, in place of their own latents there."""
    ahead: bool = False
    """Rewards see the latents after step `end`, noise and all, not the clean prediction."""
    recoveries: tuple[Recovery, ...] = ()
    """The way goes through these, and no step of the rollout."""

    def spans(self) -> list[tuple[Sequence[int], int | None]]:
        """Supports and end of each leap, or of each step, the last one first; None: clean latents."""
        first = 0 if self.rescale else min(self.trained)
        spans = self.leaps or [(k,) for k in range(self.end, first - 1, -1)]
        last = self.end + 1 if self.ahead else None
        return [*zip(spans, [last, *(supports[0] for supports in spans[:-1])], strict=True)]


def levers(schedule: Schedule) -> int:
    """Steps of a grid that begin at a noise level of at least `LEVER`: 0 .. n - 1.

    >>> levers(Schedule(torch.tensor([1.0, 0.5, 0.001, 0.0]), torch.tensor([1000.0, 500.0, 1.0])))
    2
    """
    return int((schedule.sigmas[:-1] >= LEVER).sum())


def quadrature(nodes: Sequence[float], end: float) -> list[float]:
    """Weights by which values at the nodes give the integral of their polynomial from the first node to `end`."""
    length = end - nodes[0]
    at, powers = (np.array(nodes) - nodes[0]) / length, np.arange(len(nodes))
    return (length * np.linalg.solve(at ** powers[:, None], 1 / (1 + powers))).tolist()


def _clock(plan: StepPlan, process: Process, place: int | None) -> tuple[float, float]:
    """(t, s) of a place of the grid, None: of clean data; d(x / s) / dt is v of a flow, s = 1, and eps of VP."""
    if place is None:
        return 0.0, 1.0
    sigma, alphas = plan.schedule.sigmas[place], plan.schedule.alphas
    alpha = max(float(process.alpha(sigma) if alphas is None else alphas[place]), 1e-3)  # 0 at terminal SNR 0
    return (float(sigma), 1.0) if isinstance(process, FlowProcess) else (float(sigma) / alpha, alpha)


def _leap(
    plan: StepPlan,
    process: Process,
    kind: PredictionType,
    supports: Sequence[int],
    end: int | None,
    sampler: Sampler | None,
) -> list[Link]:
    """The links of a leap from its first support to the place `end`, None: to clean latents; late to early."""
    result, clocks = list[Link](), [_clock(plan, process, k) for k in supports]
    (goal, after), ends = _clock(plan, process, end), None if end is None else torch.tensor([end, end])
    weights = quadrature([t for t, _ in clocks], goal)
    for k, (t, scale), weight in zip(supports, clocks, weights, strict=True):
        # Row 0 is x = 1 and y = 0, row 1 the other way round.
        x, y = torch.eye(2)[:, :, None].unbind()
        step = plan.steps(torch.tensor([k, k]), process, ends=ends)
        prediction = process.predict(y, x, step.sigma, kind, step.alpha)
        ahead = prediction.x0_hat if end is None else euler_mean(process, prediction, step)
        if sampler is not None and plan.stochastic[k]:
            ahead = sampler.transition(process, prediction, x, step).mean
        keep, gain = floats(ahead.flatten())
        if len(supports) > 1:  # what a part of the long step does; latents but the start's are given
            part = weight / (goal - t)
            keep, gain = after / scale + part * (keep - after / scale) if k == supports[0] else 1.0, part * gain
        result.append(Link(k, keep, gain))
    return result[::-1]


def links(
    plan: StepPlan, process: Process, kind: PredictionType, route: Route, sampler: Sampler | None = None
) -> list[Link]:
    """The links of a route, late to early, with the factors of its gradients; `kind` is that of a network's output, and
    `sampler` takes the steps with noise, which is given."""
    parts = [_leap(plan, process, kind, supports, end, sampler) for supports, end in route.spans()]
    result = list[Link]()
    for part in parts if route.leaps else [[*chain(*parts)]]:
        size = {link.step: abs(link.gain) for link in part}
        trained, sides = sum(size.get(k, 0) for k in route.trained), {link.step for link in part[:-1] if route.leaps}
        factor = 1 + route.rescale * (sum(size.values()) / trained - 1) if route.rescale else 1.0
        for link in part:
            gain = factor * (SIDE if link.step in sides else 1.0) * link.gain
            result.append(replace(link, gain=gain, through=route.rho if link.step in route.through else 0.0))
    return result


def recovered(y: Tensor, x: Tensor, eps: Tensor, step: Step, process: Process, kind: PredictionType) -> Tensor:
    """Clean latents after a deterministic step from x by its output y, less the noise eps; linear in the three."""
    ahead = euler_mean(process, process.predict(y, x, step.sigma, kind, step.alpha), step)
    return (ahead - expand(step.sigma_next, x) * eps) / expand(step.alpha_next, x)


def misses(plan: StepPlan, process: Process, route: Route, kept: Mapping[int, Kept], x0: Tensor) -> Tensor:
    """Mean distance of the end of each leap, the last one first, from where it lands, [leaps, B]; x0 [B, ...]."""
    result, true = list[Tensor](), x0
    for supports, end in route.spans():
        (goal, after), clocks = _clock(plan, process, end), [_clock(plan, process, k) for k in supports]
        start = kept[supports[0]].x.float()
        landed = start / clocks[0][1]
        for k, (t, scale), weight in zip(supports, clocks, quadrature([t for t, _ in clocks], goal), strict=True):
            landed = landed + weight / t * (kept[k].x.float() / scale - kept[k].x0_hat)
        result.append((true - after * landed).abs().flatten(1).mean(dim=1))
        true = start
    return torch.stack(result)


def pulled_back(
    gradient: Tensor,
    links: Sequence[Link],
    trained: Collection[int],
    product: Callable[[int, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """(step, c [B, ...]) of the trained steps, late to early; a product is taken before its c is handed out.

    `gradient` is dR/dx at the end of the first link, [B, ...]; `links` go late to early; `trained` are the steps whose
    c is wanted; `product`: (step, c) -> (dy/dx)^T c there, [B, ...].

    >>> two = [Link(1, 1.0, -0.5, through=1.0), Link(0, 1.0, -0.5)]
    >>> [(k, float(c)) for k, c in pulled_back(torch.ones(1), two, (0, 1), lambda k, c: 3 * c)]
    [(1, -0.5), (0, 0.25)]
    """
    for link in links:
        c, gradient = link.gain * gradient, link.keep * gradient
        if link.through:
            gradient = gradient + link.through * product(link.step, c)
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
