"""Marks in time on a device: CUDA events, on the CPU the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARMUPS = 3
"""Calls, forwards or microbatches before those that are measured."""


class Clock:
    """Marks on a device, and the milliseconds between neighbours."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        """On a GPU the place among its work, which is not waited for."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds from each mark to the next one."""
        if self.cuda:
            torch.cuda.synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [before.elapsed_time(after) for before, after in pairs]
        return [1000 * (after - before) for before, after in zip(self._seconds, self._seconds[1:], strict=False)]


def timed(work: Callable[[], Any], device: torch.device, repeats: int, warmups: int = WARMUPS) -> list[float]:
    """Milliseconds of `repeats` calls, after `warmups` others."""
    for _ in range(warmups):
        work()
    clock = Clock(device)
    clock.mark()
    for _ in range(repeats):
        work()
        clock.mark()
    return clock.spans()


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Begin to look for the most that is allocated."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most that was allocated since `reset_peak`, in GiB; None on the CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """The card, or the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
