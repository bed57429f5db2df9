"""Windows of steps that move from iteration to iteration, and random subsets of steps; iterations count from 1.

All are pure functions of seed and iteration, the same on every rank, so a resumed run needs no state of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.rng import permutation, stream
from flowrl.core.tensors import ints
from flowrl.core.types import SampleId


def random_window(num_steps: int, size: int, low: int, high: int, seed: int, iteration: int) -> tuple[int, ...]:
    """`size` neighbouring steps inside [low, high), the start uniform: Flow-GRPO-Fast.

    Raises ValueError: the window is empty, does not fit, or could hold the last step.

    >>> random_window(10, 3, 0, 3, seed=0, iteration=1)
    (0, 1, 2)
    """
    if size < 1:
        raise ValueError(f"a window of size {size} is empty: give at least 1, or no window for all steps but the last")
    if not 0 <= low <= high - size:
        raise ValueError(f"a window of {size} steps does not fit between steps {low} and {high} (exclusive)")
    if high > num_steps - 1:
        raise ValueError(
            f"windows up to step {high} (exclusive) could hold the last of {num_steps} steps, whose Gaussian is too "
            f"sharp to be scored: the range must end at {num_steps - 1} or before"
        )
    start = int(stream(seed, "random_window", iteration).integers(low, high - size, endpoint=True))
    return tuple(range(start, start + size))


def subset(
    num_steps: int, count: int, seed: int, iteration: int, steps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """`count` steps drawn from `steps` (None: all but the last), not necessarily neighbours, in rising order.

    Raises ValueError: nothing is drawn, or more than there is; `steps` leaves the grid or holds the last step.
    """
    pool = tuple(range(num_steps - 1)) if steps is None else tuple(sorted(set(steps)))
    wrong = [k for k in pool if not 0 <= k < num_steps - 1]
    if wrong:
        raise ValueError(f"step {wrong[0]} cannot be drawn: of {num_steps} steps, 0..{num_steps - 2} can be trained")
    if not 1 <= count <= len(pool):
        raise ValueError(f"cannot draw {count} of {len(pool)} steps: give a number in 1..{len(pool)}")
    chosen = permutation(len(pool), seed, "step_subset", iteration)[:count]
    return tuple(sorted(pool[j] for j in ints(chosen)))


def spread(steps: Sequence[int], seed: int, iteration: int) -> tuple[int, ...]:
    """The steps in an order of the iteration's own: slot p has the p-th, and from the last one on again (Flash-GRPO).

    >>> sorted(spread([0, 2, 5], seed=0, iteration=1))
    [0, 2, 5]
    """
    return tuple(steps[j] for j in ints(permutation(len(steps), seed, "step_spread", iteration)))


def step_subsets(ids: Sequence[SampleId], trained: Sequence[int], fraction: float, seed: int, iteration: int) -> Tensor:
    """Steps that each of B samples keeps of K trained ones: bool [B, K], int(K * fraction) per sample (DanceGRPO).

    Keyed by identity, so a sample keeps the same steps whichever rank trains it. Flattened, the mask is in
    the order of a rollout's edges.

    Raises ValueError: `fraction` leaves a sample without a step, or is above 1.
    """
    kept = int(len(trained) * fraction) if 0 < fraction <= 1 else 0
    if kept < 1:
        raise ValueError(
            f"a fraction of {fraction:g} of {len(trained)} trained steps is no subset: it must keep at least one step "
            "and be at most 1"
        )
    mask = torch.zeros(len(ids), len(trained), dtype=torch.bool)
    for row, i in zip(mask, ids, strict=True):
        row[permutation(len(trained), seed, "sample_steps", iteration, i.slot, i.sample)[:kept]] = True
    return mask


@dataclass(frozen=True, kw_only=True)
class MixWindow:
    """MixGRPO's window, sliding from noisy to clean; defaults of the released FLUX script."""

    strategy: Literal["progressive", "random", "decay", "exp_decay", "frozen"] = "progressive"
    """`progressive`: every `interval` iterations; `decay`, `exp_decay`: sooner the cleaner; `random`: another
    start in every iteration; `frozen`: the first steps for ever."""
    size: int = 4
    """Steps in the window (w)."""
    shift: int = 1
    """Steps by which it moves (s), where windows overlap."""
    interval: int = 25
    """Iterations at one place (tau)."""
    overlap: bool = True
    """Move by `shift`; false moves by `size`, so windows do not overlap."""
    roll_back: bool = False
    """Return to the first step after the last trained one; false stays there."""
    longest: int = 10
    """`decay`: iterations at the noisiest place."""
    shortest: int = 1
    """`decay`: iterations at the cleanest place."""
    rate: float = 0.1
    """`exp_decay`: iterations shrink by exp(-rate) per step ..."""
    threshold: int = 13
    """... from this step on."""

    def __post_init__(self) -> None:
        at_least = {"size": (self.size, 1), "shift": (self.shift, 0), "interval": (self.interval, 1)}
        at_least |= {"shortest": (self.shortest, 1), "rate": (self.rate, 0)}
        for name, (value, least) in at_least.items():
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.longest < self.shortest:
            raise ValueError(f"longest={self.longest} must not be below shortest={self.shortest}")

    def stay(self, start: int, limit: int) -> int:
        """Iterations at `start`; `limit` is the first step that is never trained."""
        if self.strategy == "decay":
            place = start / limit
            return max(self.shortest, int(self.longest * (1 - place) + self.shortest * place))
        if self.strategy == "exp_decay":
            return math.ceil(self.interval * math.exp(-self.rate * max(0, start - self.threshold)))
        return self.interval

    def last(self, num_steps: int) -> int:
        """The cleanest step that it ever holds.

        >>> [MixWindow(strategy=name).last(20) for name in ("progressive", "random", "frozen")]
        [17, 17, 3]
        """
        limit, shift = num_steps - 2, self.shift if self.overlap else self.size
        if self.strategy == "random":
            return limit - 1
        start = limit - 1
        if self.strategy == "frozen" or shift == 0:
            start = 0
        elif self.roll_back:
            start -= start % shift
        return min(start + self.size, limit) - 1


def mix_window(config: MixWindow, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
    """Steps of MixGRPO's window; as released, the last two steps are never trained and the window ends before them.

    Two differences from the released code, which lets the start reach X = num_steps - 2, where the window is
    empty and the loss 0 for as long as it stays: here X - 1 is the last start, from which it turns back (the
    sequence is then the released one without its empty windows) or where it stays. And `random` draws from the
    run's seed, from the first iteration on, instead of from each rank's own entropy.

    >>> [mix_window(MixWindow(size=2, interval=2), 8, seed=0, iteration=k) for k in (1, 2, 3)]
    [(0, 1), (0, 1), (1, 2)]
    """
    limit = num_steps - 2
    if limit < 1:
        raise ValueError(f"MixGRPO never trains the last two steps: {num_steps} steps leave none, give at least 3")
    if iteration < 1:
        raise ValueError(f"iterations count from 1, got {iteration}")
    if config.strategy == "random":
        last = max(limit - config.size, 0)
        start = int(stream(seed, "mix_window", iteration).integers(0, last, endpoint=True))
    else:
        start = 0 if config.strategy == "frozen" else _mix_start(config, limit, iteration)
    return tuple(range(start, min(start + config.size, limit)))


def _mix_start(config: MixWindow, limit: int, iteration: int) -> int:
    """Start of the sliding window: all its places from the first iteration on are walked through."""
    start, done = 0, iteration - 1
    while done >= (stay := config.stay(start, limit)):
        done -= stay
        start += config.shift if config.overlap else config.size
        if start >= limit:
            start = 0 if config.roll_back else limit - 1
    return start
