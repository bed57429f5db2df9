"""FlowBP: the gradient of differentiable rewards at some steps of a rollout, by the linear paths between them.

    1. roll out by the ODE; draw the steps that are trained; G = dR/dx0, a sample above the hinge has none
    2. theta gets the sum of (dy_k/dtheta)^T c_k. On a flow, with d_k = sigma_k+1 - sigma_k:
       sparse     c_k = f d_k G
       bridge     from a step j on c_k = f d_k G, before it f d_k H, H = G + rho (dy_j/dx)^T c_j
       lagrange   two leaps k -> j -> clean by polynomials through `order` outputs each: c_i = f s omega_i G from j on,
                  f s omega_i H before it, s = 1 at a leap's start, .25 at its second support; no others are trained
       f = 1 + r (sum of all |d| / sum of the trained - 1), of omega in each leap

Source: arXiv 2606.11075; RuoyuWang-2077/FlowBP:flowbp/trainers.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.algorithms._climbing import ClimbOptions, KlOptions, LeapOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.core.errors import OptionError
from flowrl.core.rng import stream
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.losses.reward_gradients import Route
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions, LeapOptions):
    rule: Literal["sparse", "bridge", "lagrange"] = "sparse"
    """`sparse`; `bridge`, which takes `rho` and `lengths` too; `lagrange`, which takes them and `tau`."""
    steps: int = 4
    """Steps that are trained, of `sparse` and `bridge`; this has them in proportion before and after its step j."""
    bias: float = 1.0
    """The i-th of all steps, or of those on a side of j, is drawn with weight i^bias, each once."""
    rescale: float = 0.0
    """r in [0, 1]: how far the trained steps stand for the others."""
    order: int = 3
    """Outputs of a leap of `lagrange`, the start and others evenly apart; fewer where it has fewer steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "steps", "order")
        require_not_negative(vars(self), "bias")
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"rescale={self.rescale} must be in [0, 1]: 0 is the plain sum, 1 the whole path's")
        if self.rule == "bridge" and self.steps < 2:
            raise OptionError(f"steps={self.steps}: a bridge has two at least", {"steps": 2})

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        key, most = ("order", num_steps - 1) if self.rule == "lagrange" else ("steps", num_steps)
        if (given := vars(self)[key]) > most:
            why = f"{key}={given}: {self.rule} on rollout.num_inference_steps={num_steps} takes {most} at most"
            raise OptionError(why, {key: most})


class FlowBp(GradientMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tau = config.tau if config.rule == "lagrange" else None

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        config, end = self.config, reach - 1
        if config.rule == "sparse":
            return Route(end, self._drawn(0, reach, config.steps, iteration, seed), rescale=config.rescale)
        k, j = config.pair(reach, iteration, seed)
        if config.rule == "lagrange":
            both = supports(j, reach, config.order), supports(k, j, config.order)
            trained = tuple(sorted((i for each in both for i in each[:2]), reverse=True))
            return Route(end, trained, (j,), config.rho, both, config.rescale)
        steps = min(config.steps, reach)
        early = min(max(round(steps * j / reach), 1, steps - (reach - j)), j, steps - 1)
        late = self._drawn(j + 1, reach, steps - early - 1, iteration, seed)
        trained = (*late, j, *self._drawn(0, j, early, iteration, seed))
        return Route(end, trained, (j,), config.rho, rescale=config.rescale)

    def _drawn(self, start: int, stop: int, count: int, iteration: int, seed: int) -> tuple[int, ...]:
        """`count` of the steps from `start` to before `stop`, or all, late to early."""
        if start == stop:
            return ()
        weight = np.linspace(0, 1, stop - start + 1)[1:] ** self.config.bias
        draws = stream(seed, "steps", iteration, start)
        chosen = draws.choice(stop - start, min(count, stop - start), replace=False, p=weight / weight.sum())
        return tuple(sorted((start + chosen).tolist(), reverse=True))


def supports(start: int, end: int, order: int) -> tuple[int, ...]:
    """The steps whose outputs predict a leap's end: its start and others evenly apart, all of a short one."""
    count = min(order, end - start)
    return tuple(start + round(place * (end - start - 1) / max(count - 1, 1)) for place in range(count))


build = FlowBp
