"""ROCM: the gradient of differentiable rewards through all noisy steps of a few-step policy, held by an f-divergence.

    1. roll out by the sampler, x' = mu(x) + s z; of a consistency model s = sigma', `cps` with noise_level 1. The last
       step, and those that begin below sigma 0.05, have no noise
    2. with z given a = dR/dx0 goes back through all steps: c = (dmu/dy) a, a <- (dmu/dx)^T a; theta gets
       (dy/dtheta)^T c
    3. loss + coef * sum over noisy steps of f(q), q = mean_d ((mu - mu_ref) / s)^2, at the latents of the rollout

        kl  q / 2        hellinger  1 - exp(-q / 8)        jensen_shannon  log 2 - E log(1 + exp(sqrt(q) u - q / 2))
        fisher  q / s^2  u standard normal

The paper's divergences are of all D values at once, where all but `kl` and `fisher` have no gradient: here they are of
one. With noise level 0 and coef 0 it is DRaFT with all steps.

Source: arXiv 2503.06171.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowrl.algorithms._climbing import ClimbOptions
from flowrl.algorithms.base import GradientMethod, Networks
from flowrl.core.strict import require_not_negative
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import GradientBatch, LossOutput
from flowrl.losses.reward_gradients import Route, climbing, levers
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


def _jensen_shannon(q: Tensor, std: Tensor) -> Tensor:
    # By Gauss and Hermite. It has no slope at 0, where that of the root is not finite.
    places, weights = (torch.from_numpy(part).to(q.device) for part in np.polynomial.hermite_e.hermegauss(32))
    q = q.double().clamp(min=1e-8)[:, None]
    mean = (softplus(q.sqrt() * places - q / 2) * weights).sum(dim=1) / math.sqrt(2 * math.pi)
    return (math.log(2) - mean).float()


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda q, std: q / 2,
    "hellinger": lambda q, std: -torch.expm1(-q / 8),
    "jensen_shannon": _jensen_shannon,
    "fisher": lambda q, std: q / std.square(),
}
"""Of q and s, [M] each: of two Gaussians of std s, sqrt(q) s apart."""


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    name: Literal["kl", "hellinger", "jensen_shannon", "fisher"] = "kl"
    """The divergence of a step from the untouched network's; the second and third have no slope where they are far
    apart."""
    coef: float = 0.0
    """Its weight in the loss; 0 evaluates no other network."""

    def __post_init__(self) -> None:
        require_not_negative(vars(self), "coef")


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions):
    default_sampler: ClassVar[str] = "cps"
    noisy: ClassVar[bool] = True

    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """Distance of every noisy step from the untouched network's: {name, coef}."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",) if self.divergence.coef > 0 else ()


class Rocm(GradientMethod[Any]):
    def route(self, reach: int, iteration: int, seed: int) -> Route:
        trained = tuple(reversed(range(reach)))
        return Route(reach - 1, trained, through=trained[:-1])

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        reach, level = levers(schedule), sampler.default_noise_level()
        levels = tuple(level if k < reach - 1 else 0.0 for k in range(len(schedule)))
        return StepPlan(schedule, levels, train=(), keep=tuple(range(reach)))

    def loss(self, batch: GradientBatch, networks: Networks) -> LossOutput:
        policy, x, step = networks.policy, batch.latents, batch.step
        output = policy.output(x, step, batch.cond)
        result = climbing(output, batch)
        if not self.roles or not step.on_cpu.noise_level.any():
            return result
        with torch.no_grad(), networks.weights.using("reference"):
            reference = policy.transition(x, step, batch.cond)
        prediction = policy.adapter.process.predict(output, x, step.sigma, policy.adapter.prediction_type, step.alpha)
        own, options = policy.distribution(prediction, x, step), self.config.divergence
        apart = DIVERGENCES[options.name](own.kl(reference, divisor="none") / own.std.square(), own.std)
        per_step = {**result.per_step, "policy/divergence": apart.detach()}
        return replace(result, loss=result.loss + options.coef * apart.sum(), per_step=per_step)


build = Rocm
