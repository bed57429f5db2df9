"""DRTune: the gradient of differentiable rewards along the linear path of a rollout, without the network's Jacobian.

    1. roll out by the ODE; the early stop e uniform in the last `window` of the steps, one draw an iteration
    2. `steps` of the steps 0 .. e are trained, (e + 1) // steps apart, from a random one on
    3. G = dR/dx0_hat at the prediction from step e; a sample above the hinge has none
    4. theta gets the sum of (dy_k/dtheta)^T c_k: on a flow c_k = (sigma_k+1 - sigma_k) G, and -sigma_e G at e

The network's inputs are detached, so no product of Jacobians grows with the depth, and early steps can be trained.

Source: arXiv 2405.00760; RuoyuWang-2077/FlowBP:flowbp/trainers/sd35 (three steps, last 40 %).
"""

from dataclasses import dataclass

from flowrl.algorithms._climbing import ClimbOptions, EndOptions, KlOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.core.rng import stream
from flowrl.core.strict import require_positive
from flowrl.losses.reward_gradients import Route

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions, EndOptions):
    steps: int = 3
    """Steps that are trained in an iteration; fewer where the stop has fewer before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "steps")


class DrTune(GradientMethod[Config]):
    predicts = True

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        end = self.config.end(reach, iteration, seed)
        apart = max(1, (end + 1) // self.config.steps)
        count = min(self.config.steps, end + 1)
        first = int(stream(seed, "route_first", iteration).integers(end + 1 - (count - 1) * apart))
        return Route(end, tuple(first + apart * place for place in reversed(range(count))))


build = DrTune
