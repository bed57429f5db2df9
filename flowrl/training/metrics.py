"""Named scalars as sums over microbatches and processes, and the seconds of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from flowrl.core.phases import phase
from flowrl.losses.batches import LossOutput


class Sums:
    """Sums and counts that add up over microbatches and processes, then divide once."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        self.values[name] += value
        self.counts[name] += count

    def add_loss(self, output: LossOutput, size: int, steps: Tensor | None = None) -> None:
        """Metrics of a batch of `size` rows, and its per-step values by denoising step, steps [size]."""
        for name, value in output.metrics.items():
            self.add(name, float(value), size)
        for name, values in output.per_step.items():
            assert steps is not None
            for k in steps.unique().tolist():
                chosen = values[steps == k]
                self.add(f"{name}/step{k:02d}", float(chosen.sum()), len(chosen))

    def merge(self, others: Iterable[Sums]) -> Sums:
        """A new table with the sums of all."""
        total = Sums()
        for other in others:
            for name, value in other.values.items():
                total.add(name, value, other.counts[name])
        return total

    def means(self) -> dict[str, float]:
        return {name: value / self.counts[name] for name, value in self.values.items() if self.counts[name]}


class Timer:
    """Seconds by phase of one iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, which is also named for errors (`phases.phase`)."""
        started = time.perf_counter()
        try:
            with phase(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - started
