"""PRFL: the gradient of a judge of noisy latents at the latents after one step, beside a step on given images.

    1. roll out by the ODE; m uniform in the last `window` of the steps, one draw an iteration
    2. G = dr/dx at x_m+1 and sigma_m+1, by the judge's logit; nothing is decoded
    3. theta gets (dy_m/dtheta)^T c, c = (sigma_m+1 - sigma_m) G on a flow
    4. the gradient on the images of `data.anchor` is added before the optimizer steps, once

Source: arXiv 2511.21541; Tencent-Hunyuan/HY-Video-PRFL.
"""

from dataclasses import dataclass
from typing import ClassVar

from flowrl.algorithms._climbing import ClimbOptions, EndOptions, KlOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.losses.reward_gradients import Route

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions, EndOptions):
    judged_noisy: ClassVar[bool] = True

    window: float = 1.0
    """Share of the steps, the last ones, that m is drawn from, all alike; one step at least."""
    anchored: bool = True
    """Whether `data.anchor` must be given; false: the step on the judge may be all, which is not PRFL as published."""


class Prfl(GradientMethod[Config]):
    def route(self, reach: int, iteration: int, seed: int) -> Route:
        end = self.config.end(reach, iteration, seed)
        return Route(end, (end,), ahead=True)


build = Prfl
