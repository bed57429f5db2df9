"""Options that methods on the gradient of rewards share: hinge and pull of all, and the drawn end of a route."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.algorithms._matching import AnchorConfig, pulling
from flowrl.algorithms._options import Options
from flowrl.core.rng import stream
from flowrl.core.strict import require_positive


@dataclass(frozen=True, kw_only=True)
class GradientOptions(Options):
    """Options of every method that climbs the gradient of its rewards."""

    hinge: float | None = None
    """A sample whose weighted sum of training values is not below this has no gradient; null: all have."""
    decoded_at_once: int = 4
    """Images whose decoder and rewards keep their graph at a time."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull of the network's output y (velocity, eps, v) to the untouched network's at every trained step, a sample's
    steps summed. At a step it balances the reward where mean_d (y - y_ref)^2 is D |c|^2 / (2 coef)^2, with D the values
    of a latent and |c| `reward_gradient/coefficient`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "decoded_at_once")

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
