"""Options that methods on the gradient of rewards share: hinge and pull of all, a route's drawn end, or its leaps."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flowrl.algorithms._matching import AnchorConfig, pulling
from flowrl.algorithms._options import Options
from flowrl.core.errors import OptionError
from flowrl.core.rng import stream
from flowrl.core.strict import require_positive


@dataclass(frozen=True, kw_only=True)
class ClimbOptions(Options):
    """Options of every method that climbs the gradient of its rewards."""

    noisy: ClassVar[bool] = False
    """Whether the rollout has the noise of `rollout.sampler`, which is given to the gradient."""

    hinge: float | None = None
    """A sample whose weighted sum of training values is not below this has no gradient; null: all have."""
    decoded_at_once: int = 4
    """Images whose decoder and rewards keep their graph at a time."""
    frames: int | None = None
    """Of a video, drawn anew for each sample and iteration: the gradient is that of the mean of their scores as images,
    and what none of them is decoded from is not decoded; null: of the whole video."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "decoded_at_once", "frames")


@dataclass(frozen=True, kw_only=True)
class KlOptions(Options):
    """A pull of a deterministic route to the untouched network's."""

    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull of the network's output y (velocity, eps, v) to the untouched network's at every trained step, a sample's
    steps summed. At a step it balances the reward where mean_d (y - y_ref)^2 is D |c|^2 / (2 coef)^2, with D the values
    of a latent and |c| `reward_gradient/coefficient`."""

    @property
    def roles(self) -> tuple[str, ...]:
        return pulling(reference=self.kl)


@dataclass(frozen=True, kw_only=True)
class EndOptions(Options):
    """The window that the end is drawn from."""

    window: float = 0.4
    """Share of the steps, the last ones, that the end is drawn from, all alike; one step at least."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.window <= 1:
            raise ValueError(f"window={self.window} must be in (0, 1]: a share of the steps")

    def end(self, reach: int, iteration: int, seed: int) -> int:
        """The step of an iteration from which the clean prediction is taken, the same on every process."""
        count = max(1, round(self.window * reach))
        return reach - 1 - int(stream(seed, "route_end", iteration).integers(count))


@dataclass(frozen=True, kw_only=True)
class LeapOptions(Options):
    """The steps k < j between which a route leaps, and how its gradient passes there."""

    rho: float = 0.3
    """Share of the gradient that goes through the network's input at step j, in [0, 1]; 0: no product of Jacobians."""
    tau: float | None = 0.1
    """A sample weighs 1 / (max(d_j, tau) + max(d_0, tau)), d the mean distance of a leap's end from where it lands;
    null: all weigh alike."""
    lengths: list[float] | None = None
    """Three weights of the Dirichlet distribution of how many steps lie after j, between k and j, before k; null: all
    pairs are alike."""
    tail: int | None = None
    """With `lengths`, steps after j at most: what is more lies before k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "tau", "tail")
        if not 0 <= self.rho <= 1:
            raise OptionError(f"rho={self.rho} must be in [0, 1]: a share", {"rho": 0.3})
        if self.tail if self.lengths is None else len(self.lengths) != 3 or min(self.lengths) <= 0:
            raise ValueError(f"lengths={self.lengths} must be three numbers above 0, or null without a tail")

    def pair(self, reach: int, iteration: int, seed: int) -> tuple[int, int]:
        """(k, j) of an iteration, the same on every process; ValueError: too few steps."""
        draws, least = stream(seed, "leap", iteration), 2 if self.lengths is None else 3
        if reach < least:
            raise ValueError(
                f"{reach} steps of the grid begin at sigma 0.05 or more, and leaps need {least}: give more"
            )
        if self.lengths is None:
            k, j = sorted(draws.choice(reach, 2, replace=False).tolist())
            return k, j
        parts = np.rint(draws.dirichlet(self.lengths) * reach).astype(int)
        for bound in (0, 1):  # none is empty, and they add up
            parts = parts.clip(min=bound)
            parts[parts.argmax()] += reach - parts.sum()
        after, between, before = parts.tolist()
        before += 0 if self.tail is None else max(after - self.tail, 0)
        return before - 1, before - 1 + between
