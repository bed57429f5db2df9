"""SRPO: the gradient of what rewards say of wanted words and not of others, at samples recovered from a noise level.

    1. roll out by the ODE from eps to x0; a noise level b, one draw an iteration, and a above it
    2. x = (1 - a) x0 + a eps, one step to b, less what is left of eps: x0' = (x + (b - a) y - b eps) / (1 - b)
    3. G = dR/dx0' of R = (1 + k) r(x0', wanted words) - r(x0', unwanted words)
    4. theta gets (dy/dtheta)^T c, c = (b - a) / (1 - b) G
    5. the same with a below b (inversion) and the words exchanged; the mean of both

With the exact y x0' is x0 at any level: rewards see no blurred prediction. What they like whatever the words cancels.

Source: arXiv 2509.06942; Tencent-Hunyuan/SRPO:fastvideo/SRPO.py.
"""

from dataclasses import dataclass, field

from flowrl.algorithms._climbing import ClimbOptions, KlOptions
from flowrl.algorithms.base import GradientMethod
from flowrl.core.rng import stream
from flowrl.losses.reward_gradients import Recovery, Route

LEVEL = "experimental"
_WANTED = ("Natural-lighting", "Detail", "Detailed", "Real")
_UNWANTED = ("Concept art", "Painting", "Anime", "Flat", "Oil")


@dataclass(frozen=True, kw_only=True)
class Config(ClimbOptions, KlOptions):
    positive: list[str] = field(default_factory=lambda: [f"{word}. {{prompt}}" for word in _WANTED])
    """Wanted words, one an iteration in turn: {prompt} is the prompt, {name} a value of its metadata."""
    negative: list[str] = field(default_factory=lambda: [f"{word}. {{prompt}}" for word in _UNWANTED])
    """Unwanted words, likewise."""
    low: float = 0.75
    """Least noise level that is drawn, in (0, 1), as of a flow."""
    high: float = 0.9643
    """Largest."""
    apart: float = 0.1
    """Share of `high` - `low` that a and b are apart; less next to either end."""
    surplus: list[float] = field(default_factory=lambda: [0.1, 0.25])
    """k at the least noise level and at the largest, linear between them."""
    inversion: list[float] | None = field(default_factory=lambda: [0.3, 0.01])
    """k of the inversion, likewise; null: it is left out."""

    @property
    def wordings(self) -> list[str]:
        return [*self.positive, *self.negative]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low < self.high < 1 or not 0 < self.apart <= 1:
            given = f"low={self.low}, high={self.high}, apart={self.apart}"
            raise ValueError(f"{given}: noise levels are 0 < low < high < 1, and apart in (0, 1] is a share of them")
        if not (self.positive and self.negative):
            raise ValueError("positive and negative must each have a wording, such as '{prompt}'")
        if {len(self.surplus), len(self.inversion or self.surplus)} != {2}:
            raise ValueError("surplus and inversion are two numbers each, at the least noise level and at the largest")


class Srpo(GradientMethod[Config]):
    def route(self, reach: int, iteration: int, seed: int) -> Route:
        config, place = self.config, stream(seed, "recovery", iteration).uniform(0.005, 0.995)
        far = min(config.apart, place, 1 - place)
        wanted, unwanted = (words[(iteration - 1) % len(words)] for words in (config.positive, config.negative))

        branches = [(place + far, config.surplus, wanted, unwanted), (place - far, config.inversion, unwanted, wanted)]
        found = list[Recovery]()
        for start, ends, better, worse in branches:
            if ends is not None:
                first, last = (config.low + at * (config.high - config.low) for at in (start, place))
                k = ends[0] + place * (ends[1] - ends[0])
                found.append(Recovery(first, last, ((1 + k, better), (-1.0, worse))))
        return Route(0, (0,), recoveries=tuple(found))


build = Srpo
