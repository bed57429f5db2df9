"""DRaFT: the gradient of differentiable rewards through the last K steps of a deterministic rollout.

    1. sample x0 by the ODE; G = dR/dx0 through the decoder, a sample above the hinge has none
    2. a = G; from the last step on back, K steps: c = gain a, a <- keep a + (dy/dx)^T c, x' = keep x + gain y
    3. theta gets the sum of (dy/dtheta)^T c, at the latents of the rollout

K = 1 is the cheapest, and multiplies no Jacobian. `low_variance` n (DRaFT-LV, K = 1) noises the last prediction again
to the last noise level, n times, and takes the mean of all 1 + n. A K that each iteration draws anew is the random
truncation of AlignProp. Steps that begin below sigma 0.05 move nothing: they are jumped, and K counts from the last
before.

Source: arXiv 2309.17400; arXiv 2310.03739 (AlignProp), mihirp1998/AlignProp;
RuoyuWang-2077/FlowBP:flowbp/trainers/sd35/draft_lv.py.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.algorithms._climbing import ClimbOptions, KlOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.core.errors import OptionError
from flowrl.core.rng import stream
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.losses.reward_gradients import Route
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions):
    steps: int = 1
    """K: the last steps that are trained, of those that begin at sigma 0.05 or more."""
    low_variance: int = 0
    """n of DRaFT-LV: further predictions from the last noise level; with K = 1."""
    truncation: Literal["fixed", "uniform", "normal"] = "fixed"
    """K of an iteration: `steps`; one of 1 .. `steps`, all alike; or N(`steps`, `spread`), AlignProp's, cut to a whole
    number and drawn again until there are so many steps."""
    spread: float = 5.0
    """Standard deviation of `normal`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "steps", "spread")
        require_not_negative(vars(self), "low_variance")
        if self.low_variance and (self.steps > 1 or self.truncation != "fixed"):
            raise OptionError(
                f"low_variance={self.low_variance} is of the last step alone",
                [{"low_variance": 0}, {"steps": 1, "truncation": "fixed"}],
            )

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        if self.steps > num_steps:
            raise OptionError(f"steps={self.steps}: rollout.num_inference_steps is {num_steps}", {"steps": 1})


class Draft(GradientMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.redrawn = config.low_variance

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        if self.config.steps > reach:
            raise ValueError(
                f"steps={self.config.steps}: {reach} steps of the grid begin at sigma 0.05 or more; give that or less"
            )
        trained = tuple(range(reach - 1, reach - 1 - self._steps(reach, iteration, seed), -1))
        return Route(reach - 1, trained, through=trained[:-1])

    def _steps(self, reach: int, iteration: int, seed: int) -> int:
        """K of the iteration."""
        config, draws = self.config, stream(seed, "truncation", iteration)
        if config.truncation == "fixed":
            return config.steps
        if config.truncation == "uniform":
            return int(draws.integers(1, config.steps + 1))
        drawn = 0
        while not 1 <= drawn <= reach:
            drawn = int(draws.normal(config.steps, config.spread))
        return drawn


build = Draft
