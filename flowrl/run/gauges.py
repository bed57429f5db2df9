"""What an iteration asked of the machine: its CPU time, operations a second of the network, the largest memory."""

import time
from collections.abc import Callable, Mapping

import torch

from flowrl.planning.out_of_memory import peak_resident
from flowrl.rollout.flop import RowFlop
from flowrl.training.sampling import Sampling

NETWORK = ("explore", "rollout", "update")
"""Phases in which the network works."""
_GIB = 2**30


class Gauges:
    """The metrics `perf/cpu_s`, `perf/tflops` and `memory/peak_gib` of each iteration (docs/metrics.md). `counts`:
    whether operations are counted, which takes seconds once; None: on a GPU, where they are few among many.
    """

    def __init__(self, sampling: Sampling, *, counts: bool | None = None) -> None:
        self.sampling = sampling
        self.counts = sampling.world.device.type == "cuda" if counts is None else counts
        self._before, self._cpu = (0, 0), 0.0
        self._flop: RowFlop | None = None
        self._asked = False

    def begin(self) -> None:
        """Start an iteration: its peak, its forwards and its CPU time count from here."""
        device, counter = self.sampling.world.device, self.sampling.counter
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before, self._cpu = (counter.rows, counter.trained), time.process_time()

    def row(self, seconds: Mapping[str, float], row_flop: Callable[[], RowFlop | None]) -> dict[str, float]:
        """The metrics of the iteration; called on every process. The seconds are those of its phases; `row_flop` counts
        the operations of a row, and is called once, where they are counted.
        """
        device, counter, world = self.sampling.world.device, self.sampling.counter, self.sampling.world
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()
        peaks, cpu = zip(*world.gather((peak, time.process_time() - self._cpu)), strict=True)
        result = {"perf/cpu_s": round(sum(cpu), 4), "memory/peak_gib": round(max(peaks) / _GIB, 4)}
        spent = sum(seconds.get(name, 0.0) for name in NETWORK)
        if not (self.counts and world.main and spent):
            return result
        if not self._asked:
            self._asked, self._flop = True, row_flop()
        if self._flop is not None:
            flop = self._flop.of(counter.rows - self._before[0], counter.trained - self._before[1])
            result["perf/tflops"] = float(f"{flop / spent / 1e12:.4g}")
        return result
