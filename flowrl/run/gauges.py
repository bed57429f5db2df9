"""What an iteration asked of the machine: operations a second of the network, and the largest memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrl.config.resolved import Resolved
from flowrl.core.types import Condition
from flowrl.planning.flop import RowFlop, row_flop
from flowrl.planning.out_of_memory import peak_resident
from flowrl.training.sampling import Sampling

NETWORK = ("explore", "rollout", "update")
"""Phases in which the network works."""
_GIB = 2**30


class Gauges:
    """The metrics `perf/tflops` and `memory/peak_gib` of each iteration (docs/metrics.md).

    Args:
        resolved: the run.
        sampling: its parts.
        counts: whether operations are counted, which takes seconds once; None: on a GPU, where they are few among many.
    """

    def __init__(self, resolved: Resolved, sampling: Sampling, *, counts: bool | None = None) -> None:
        self.resolved, self.sampling = resolved, sampling
        self.counts = sampling.world.device.type == "cuda" if counts is None else counts
        self._before = (0, 0)
        self._flop: RowFlop | None = None
        self._asked = False

    def begin(self) -> None:
        """Start an iteration: its peak and its forwards count from here."""
        device, counter = self.sampling.world.device, self.sampling.counter
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = counter.rows, counter.trained

    def row(self, seconds: Mapping[str, float], cond: Condition) -> dict[str, float]:
        """The metrics of the iteration, whose phases took `seconds`; called on every process.

        `cond` are conditions of its prompts, by whose shapes operations are counted.
        """
        device, counter, world = self.sampling.world.device, self.sampling.counter, self.sampling.world
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()
        result = {"memory/peak_gib": round(max(world.gather(peak)) / _GIB, 4)}
        spent = sum(seconds.get(name, 0.0) for name in NETWORK)
        if not (self.counts and world.main and spent):
            return result
        if not self._asked:
            self._asked, self._flop = True, row_flop(self.resolved, cond, self.sampling.adapter.unconditional)
        if self._flop is not None:
            flop = self._flop.of(counter.rows - self._before[0], counter.trained - self._before[1])
            result["perf/tflops"] = float(f"{flop / spent / 1e12:.4g}")
        return result
