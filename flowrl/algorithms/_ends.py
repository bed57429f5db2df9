"""The end of a route before the last step, drawn anew in each iteration: for methods whose rewards see a prediction."""

from dataclasses import dataclass

from flowrl.algorithms._options import Options
from flowrl.core.rng import stream


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
