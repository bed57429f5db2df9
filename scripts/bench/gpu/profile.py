"""torch's profiler over one step of a rollout and one update: a trace, the largest costs, what waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from flowrl.core.errors import Abandoned
from flowrl.rollout.loop import RunOptions
from scripts.bench.gpu.clock import WARMUPS, Clock, wait
from scripts.bench.gpu.records import Row
from scripts.bench.gpu.session import Bench

SHOWN = 10
"""Costs that are listed."""
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Events in which the CPU waits for the GPU; the last one also counts on the CPU."""
OVERHEAD = ("Command Buffer Full", "Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
"""Events of the profiler itself and of the driver's queue, which have a time on the device and are no operators."""


@dataclass(frozen=True, slots=True)
class Found:
    """A profile of some work."""

    profiler: Any
    wall_ms: float
    cuda: bool

    def costs(self) -> list[Row]:
        """The operators by their own time on the device, on the CPU by that of the CPU; the largest first."""
        rows: list[Row] = []
        for event in self.profiler.key_averages():
            if event.device_type.name != "CPU" or event.key in OVERHEAD:
                continue  # a kernel, whose time the operator that started it has too; or no operator
            device, own = event.self_device_time_total / 1000, event.self_cpu_time_total / 1000
            rows.append({"op": event.key, "count": event.count, "device_ms": device, "cpu_ms": own})
        key = "device_ms" if self.cuda else "cpu_ms"
        total = sum(row[key] for row in rows) or 1.0
        rows = [row | {"share": row[key] / total} for row in rows]
        return sorted(rows, key=lambda row: -row[key])

    @property
    def busy_ms(self) -> float:
        """Time in which the device works, on one stream."""
        kernels = [event for event in self.profiler.key_averages() if event.device_type.name != "CPU"]
        return sum(event.self_device_time_total for event in kernels) / 1000

    def count(self, name: str) -> int:
        """Events of a name."""
        return sum(event.count for event in self.profiler.key_averages() if event.key == name)


def profiled(work: Callable[[Callable[[], None], Callable[[], None]], None], device: torch.device) -> Found:
    """A profile of the part of `work` between its calls of its two arguments, start and stop."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    profiler, clock = torch.profiler.profile(activities=activities), Clock(torch.device("cpu"))

    def start() -> None:
        wait(device)
        profiler.start()
        clock.mark()

    def stop() -> None:
        wait(device)
        clock.mark()
        profiler.stop()

    work(start, stop)
    return Found(profiler, clock.spans()[0], cuda)


def step(bench: Bench) -> Found:
    """One step of the run's denoising loop, after some that warm it up."""

    def work(start: Callable[[], None], stop: Callable[[], None]) -> None:
        calls = 0

        def ticked() -> bool:
            nonlocal calls
            calls += 1
            if calls == WARMUPS:
                start()
            if calls == WARMUPS + 1:
                stop()
            return calls > WARMUPS

        while calls <= WARMUPS:
            try:
                bench.draw(bench.ids(1), RunOptions(stop=ticked))
            except Abandoned:
                break

    return profiled(work, bench.device)


def update(bench: Bench) -> Found:
    """One update of one training forward."""
    own, credit = bench.scored(bench.draw(bench.ids(1)))
    bench.update(own, credit, 1)  # warms up

    def work(start: Callable[[], None], stop: Callable[[], None]) -> None:
        start()
        bench.update(own, credit, 1)
        stop()

    return profiled(work, bench.device)


def both(bench: Bench) -> dict[str, Found]:
    """The profiles by name."""
    return {"rollout step": step(bench), "update": update(bench)}


def summary(name: str, found: Found) -> Row:
    """A profile in a line."""
    row: Row = {"phase": name, "wall_ms": round(found.wall_ms, 2)}
    if found.cuda:
        row |= {"busy_ms": round(found.busy_ms, 2), "idle_share": round(1 - found.busy_ms / found.wall_ms, 3)}
    waits = {event: found.count(event) for event in WAITING}
    row["waits"] = sum(waits[event] for event in WAITING[:3]) if found.cuda else waits[WAITING[3]]
    return row | {"largest": [f"{cost['op']} {cost['share']:.0%}" for cost in found.costs()[:SHOWN]]}


def report(name: str, found: Found) -> str:
    """The largest costs as a Markdown table."""
    key = "device_ms" if found.cuda else "cpu_ms"
    head = "device ms" if found.cuda else "CPU ms"
    busy = f", the device works {found.busy_ms / found.wall_ms:.0%} of it" if found.cuda else ""
    lines = [f"{name}: {found.wall_ms:.1f} ms{busy}", "", f"| operator | share | count | {head} |", "|---|---|---|---|"]
    for cost in found.costs()[:SHOWN]:
        lines.append(f"| {cost['op']} | {cost['share']:.1%} | {cost['count']} | {cost[key]:.2f} |")
    return "\n".join(lines)


def write(found: dict[str, Found], file: Path) -> list[Path]:
    """Traces for a viewer of Chrome's format, one for each profile, named after `file`: .json, or packed .json.gz."""
    file.parent.mkdir(parents=True, exist_ok=True)
    stem, ending = file.name.partition(".json")[0], ".json.gz" if file.suffix == ".gz" else ".json"
    written = [file.with_name(f"{stem}-{name.replace(' ', '-')}{ending}") for name in found]
    for target, profile in zip(written, found.values(), strict=True):
        profile.profiler.export_chrome_trace(str(target))
    return written
