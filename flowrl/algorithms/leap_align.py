"""LeapAlign: the gradient of differentiable rewards along two leaps of a rollout, k -> j -> clean.

    1. roll out by the ODE; two steps k < j, one draw an iteration; G = dR/dx0, a sample above the hinge has none
    2. c_j = gain_j G, H = G + rho (dy_j/dx)^T c_j, c_k = gain_k H; on a flow the gains are -sigma_j, sigma_j - sigma_k
    3. theta gets w ((dy_j/dtheta)^T c_j + (dy_k/dtheta)^T c_k), w = 1 / (max(d_j, tau) + max(d_0, tau)), d the mean
       distance of a leap's end from where it lands

Source: arXiv 2604.15311; RuoyuWang-2077/FlowBP:flowbp/trainers/sd35/leapalign.py.
"""

from dataclasses import dataclass

from flowrl.algorithms._climbing import ClimbOptions, KlOptions, LeapOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.losses.reward_gradients import Route

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions, LeapOptions):
    """Nothing of its own."""


class LeapAlign(GradientMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tau = config.tau

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        k, j = self.config.pair(reach, iteration, seed)
        return Route(reach - 1, (j, k), through=(j,), rho=self.config.rho, leaps=((j,), (k,)))


build = LeapAlign
