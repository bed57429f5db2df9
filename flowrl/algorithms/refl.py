"""ReFL: the gradient of differentiable rewards at the clean prediction of one late step.

    1. roll out by the ODE; m uniform in the last `window` of the steps, one draw an iteration
    2. G = dR/dx0_hat at the prediction from step m; a sample above the hinge has none
    3. theta gets (dy_m/dtheta)^T c, c = -sigma_m G on a flow: nothing goes through earlier steps

Unlike DRaFT-1 it reaches several noise levels, at the price of blurred images that the reward was not made for.

Source: arXiv 2304.05977; THUDM/ImageReward:ImageReward/ReFL.py; RuoyuWang-2077/FlowBP.
"""

from dataclasses import dataclass

from flowrl.algorithms._climbing import ClimbOptions, EndOptions, KlOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.losses.reward_gradients import Route

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions, EndOptions):
    """Nothing of its own."""


class Refl(GradientMethod[Config]):
    predicts = True

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        end = self.config.end(reach, iteration, seed)
        return Route(end, (end,))


build = Refl
