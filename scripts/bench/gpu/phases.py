"""The phases of a run on a device: milliseconds, TFLOP/s and the largest memory of each."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowrl.core.errors import Abandoned
from flowrl.models.base import decoded
from flowrl.models.memory.meter import Meter
from flowrl.planning.out_of_memory import planned
from flowrl.rollout.loop import RunOptions
from flowrl.run import checkpoint
from scripts.bench.gpu import gate, profile
from scripts.bench.gpu.clock import WARMUPS, Clock, peak_gib, reset_peak, timed, wait
from scripts.bench.gpu.records import Row, middle
from scripts.bench.gpu.session import Bench

MICROBATCHES = 3
"""Training forwards of a measured update."""


def rollout(bench: Bench, repeats: int) -> Row:
    """Milliseconds of a step of a batch in the run's loop: network, sampler, noise and record."""
    counter = bench.session.parts.sampling.counter
    clock, before, wanted = Clock(bench.device), counter.rows, WARMUPS + repeats + 1
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        clock.mark()
        return calls >= wanted

    reset_peak(bench.device)
    while calls < wanted:
        try:
            bench.draw(bench.ids(1), RunOptions(stop=stop))
        except Abandoned:
            break
    times, rows = clock.spans()[WARMUPS:], (counter.rows - before) / max(calls - 1, 1)
    result: Row = {"ms_per_forward": middle(times), "rows": round(rows, 2), "peak_gib": peak_gib(bench.device)}
    steps = len(bench.plan)
    result["samples_per_s"] = float(f"{bench.batch / (statistics.median(times) * steps / 1000):.4g}")
    return result | _tflops(bench, rows, 0, times)


def update(bench: Bench, repeats: int) -> Row:
    """Milliseconds of a training forward with its backward pass, and of an optimizer step, in the run's own learner.

    The steps are timed by themselves; the rest of an update is that of its forwards.
    """
    counter, updates = bench.context.counter, bench.context.method.passes
    # A sample gives a forward many steps or times, but as few as one of a method on finished samples.
    own, credit = bench.scored(bench.draw(bench.ids(2 if bench.resolved.training.takes_sampler else MICROBATCHES)))
    forwards = MICROBATCHES * updates
    reset_peak(bench.device)
    bench.update(own, credit, MICROBATCHES)  # with as many forwards as there are warm-ups
    before = counter.rows, counter.trained
    with bench.steps() as clock:
        whole = timed(lambda: bench.update(own, credit, MICROBATCHES), bench.device, repeats, warmups=0)
    rows, trained = (counter.rows - before[0]) / forwards / repeats, (counter.trained - before[1]) / forwards / repeats
    steps = clock.spans()[::2]
    spent = [sum(steps[number * updates : (number + 1) * updates]) for number in range(repeats)]
    each = statistics.median((ms - stepping) / forwards for ms, stepping in zip(whole, spent, strict=True))
    result: Row = {
        "ms_per_microbatch": float(f"{each:.4g}"),
        "ms_per_optimizer_step": middle(steps),
        "rows": round(rows, 2),
        "trained_rows": round(trained, 2),
        "peak_gib": peak_gib(bench.device),
    }
    return result | _tflops(bench, rows, trained, [each])


def _tflops(bench: Bench, rows: float, trained: float, times: list[float]) -> Row:
    """Useful TFLOP/s of a forward of so many rows; nothing for a model that cannot be counted."""
    each = bench.flop()
    if each is None:
        return {}
    flop = rows * each.forward + trained * each.backward
    return {"tflop": float(f"{flop / 1e12:.4g}"), "tflops": middle([flop / ms / 1e9 for ms in times if ms > 0])}


def decode(bench: Bench, repeats: int) -> Row:
    """Milliseconds of an image or a video through the VAE's decoder, at the batch of the rollout.

    And the mean and the largest difference of its values from those of the first variant, in levels of 1/255.
    """
    ids = bench.ids(1)
    asked, model = bench.asked(ids), bench.session.model
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(len(ids), *model.latent_shape(), generator=generator).to(bench.device)
    reset_peak(bench.device)
    times = timed(lambda: decoded(model, x0, asked.cond, asked.rows), bench.device, repeats, warmups=1)
    result: Row = {"ms_per_sample": middle([ms / len(ids) for ms in times]), "peak_gib": peak_gib(bench.device)}
    images = decoded(model, x0, asked.cond, asked.rows).float().cpu()
    apart = 255 * (images - bench.first.setdefault(bench.batch, images)).abs()
    return result | {"mean_levels": float(f"{apart.mean():.3g}"), "most_levels": float(f"{apart.max():.3g}")}


def memory(bench: Bench, repeats: int) -> list[Row]:
    """Peaks against `flowrl plan`; on the CPU the storages made in a phase against its transient part."""
    estimate = planned(bench.resolved, 1)
    own, credit = bench.scored(bench.draw(bench.ids()))
    works: dict[str, Callable[[], Any]] = {
        "rollout": lambda: bench.draw(bench.ids(1)),
        "decode": lambda: decode(bench, 1),
        "update": lambda: bench.update(own, credit, 1),
    }
    works["update"]()  # the optimizer's moments
    rows: list[Row] = []
    for phase in estimate.phases:
        if phase.name not in works:
            continue
        found, plan = _peak(works[phase.name], bench.device), phase.transient
        if bench.device.type == "cuda":
            plan = phase.peak
        ratio = None if not plan else round(found / plan, 3)
        gib = None if plan is None else round(plan / 2**30, 4)
        rows.append({"phase": phase.name, "measured_gib": round(found / 2**30, 4), "plan_gib": gib, "ratio": ratio})
    return rows


def _peak(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes at the peak of `work`: all that is allocated on a GPU, on the CPU what it makes."""
    if device.type == "cuda":
        reset_peak(device)
        work()
        wait(device)
        return torch.cuda.max_memory_allocated(device)
    with Meter() as meter:
        work()
    return meter.peak


def noise(bench: Bench, repeats: int) -> Row:
    """Milliseconds of a batch's noise on the CPU, of its copy, and of switching to the reference and back."""
    ids, source, weights = bench.ids(1), bench.noise(), bench.session.weights
    drawn = source.step(ids, 0)
    result: Row = {"samples": len(ids), "values": drawn[0].numel()}
    cpu = torch.device("cpu")
    result["noise_ms"] = middle(timed(lambda: source.step(ids, 0), cpu, repeats, warmups=1))
    result["copy_ms"] = middle(timed(lambda: drawn.to(bench.device), bench.device, repeats))
    if weights.lora is not None or "reference" in weights.copies:
        result["reference_ms"] = middle(timed(lambda: _switched(bench), cpu, repeats, warmups=1))
    return result


def _switched(bench: Bench) -> None:
    with bench.session.weights.using("reference"):
        pass
    wait(bench.device)


def saved(bench: Bench, repeats: int) -> Row:
    """Seconds of a checkpoint, written and verified, and its size."""
    tensors, plain = bench.session.state()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with tempfile.TemporaryDirectory(prefix="flowrl-bench-") as folder:
        started = time.perf_counter()
        checkpoint.save(Path(folder), checkpoint.Checkpoint(1, tensors, plain), keep=1)
        written = time.perf_counter()
        checkpoint.load(Path(folder), 1)
        read = time.perf_counter()
    seconds = written - started
    return {
        "mb": round(size / 1e6, 2),
        "save_s": round(seconds, 3),
        "verify_s": round(read - written, 3),
        "mb_per_s": round(size / 1e6 / seconds, 1),
    }


def profiled(bench: Bench, repeats: int) -> list[Row]:
    """The busy share of a step and of an update, with what waits for the device."""
    return [profile.summary(name, found) for name, found in profile.both(bench).items()]


WHAT: dict[str, Callable[[Bench, int], Row | list[Row]]] = {
    "gate": gate.measure,
    "rollout": rollout,
    "update": update,
    "decode": decode,
    "memory": memory,
    "noise": noise,
    "profile": profiled,
    "checkpoint": saved,
}
"""Name -> measurement; the gate first, since updates move the weights that it replays."""
