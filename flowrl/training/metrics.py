"""Named scalars: sums over microbatches and processes, metrics of an iteration's samples, the seconds of each phase."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.tensors import floats, ints, sent
from flowrl.credit.advantages import Advantages
from flowrl.credit.shares import variance_shares
from flowrl.display.phases import phase
from flowrl.losses.batches import LossOutput
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.weighted import WeightedReward

OF_THE_MACHINE = ("time/", "perf/", "memory/")
"""Beginnings of the names whose values depend on the machine and on what else runs there."""


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row of `metrics.jsonl` that two runs of one configuration have in common.

    >>> repeatable({"grad/norm": 1.0, "time/update_s": 0.3, "perf/tflops": 2.0, "memory/peak_gib": 1.5})
    {'grad/norm': 1.0}
    """
    return {name: value for name, value in row.items() if not name.startswith(OF_THE_MACHINE)}


class Sums:
    """Sums and counts that add up over microbatches and processes, then divide once."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self._waiting: list[_Waiting] = []

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        self.values[name] += value
        self.counts[name] += count

    def add_loss(self, output: LossOutput, size: int, steps: Tensor | None = None) -> None:
        """Metrics of a batch of `size` rows, and its per-step values by denoising step, steps [size] on the CPU.

        They stay on the device until `fetch`.
        """
        given, device = (*output.metrics.values(), *output.per_step.values()), output.loss.device
        if not given:
            return
        parts = [torch.as_tensor(value).detach() for value in given]
        # Types mix upwards: float32 is exact in float64.
        flat, dtypes = torch.cat([sent(part.reshape(-1), device) for part in parts]), [part.dtype for part in parts]
        self._waiting.append(_Waiting(list(output.metrics), list(output.per_step), flat, dtypes, size, steps))

    def fetch(self) -> None:
        """Add what `add_loss` was given since, with one copy from the device."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        table = torch.cat([each.flat for each in waiting]).cpu()
        for each, flat in zip(waiting, table.split([len(each.flat) for each in waiting]), strict=True):
            self._add(each, flat)

    def _add(self, batch: "_Waiting", flat: Tensor) -> None:
        """Add the values of one batch, on the CPU."""
        sums = len(batch.sums)
        for name, value in zip(batch.sums, floats(flat[:sums]), strict=True):
            self.add(name, value, batch.size)
        rows = flat[sums:].split(batch.size) if batch.by_step else ()
        for name, values, dtype in zip(batch.by_step, rows, batch.dtypes[sums:], strict=True):
            assert batch.steps is not None
            for k in ints(batch.steps.unique()):
                chosen = values[batch.steps == k].to(dtype)
                self.add(f"{name}/step{k:02d}", float(chosen.sum()), len(chosen))

    def merge(self, others: "Iterable[Sums]") -> "Sums":
        """A new table with the sums of all."""
        total = Sums()
        for other in others:
            other.fetch()
            for name, value in other.values.items():
                total.add(name, value, other.counts[name])
        return total

    def means(self) -> dict[str, float]:
        self.fetch()
        return {name: value / self.counts[name] for name, value in self.values.items() if self.counts[name]}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Metrics of a batch that are still on its device."""

    sums: list[str]
    """Names of the sums."""
    by_step: list[str]
    """Names of what has a value for each row."""
    flat: Tensor
    """The sums, then the values, one name after the other."""
    dtypes: list[torch.dtype]
    """Of each name's own values."""
    size: int
    steps: Tensor | None


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


def sample_metrics(
    rollout: Rollout, credit: Advantages, entries: Sequence[WeightedReward], counted: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Metrics of an iteration's samples. The rollout has the scores of all processes; `entries` are the trained
    rewards, in its order, of which a method may need none; `counted`: counts of the scorer of each process, by name.
    """
    weights = torch.tensor([entry.weight for entry in entries])
    total = rollout.rewards.nan_to_num().mul(weights[:, None, None]).sum(0)
    row: dict[str, Any] = {"reward/total_mean": float(total[credit.valid].mean())} if entries else {"reward/none": 1}
    for name, table in rollout.raw.items():
        scored = table[table.isfinite()]
        row[f"reward/{name}_mean"] = float(scored.mean()) if len(scored) else math.nan
    if entries:
        row["reward/group_std"] = spread(total)
    row["reward/masked"] = int((~credit.valid).sum())
    row |= {f"reward/{name}": sum(part[name] for part in counted) for name in counted[0]}
    row["advantage/dead_group_share"] = float(credit.dead.float().mean())
    row["advantage/largest"] = largest(credit)
    shares = variance_shares(rollout.rewards, weights, credit.valid) if len(entries) > 1 else None
    for entry, share in zip(entries, shares or (), strict=False):
        row[f"advantage/{next(iter(entry.shares()))}_share"] = share
    row["sample/image_std"] = rollout.image_std
    return row


def largest(credit: Advantages) -> float:
    """Largest size of a credit: about 1 where rewards are divided by their std."""
    values = credit.values if credit.steps is None else credit.steps
    return float(values.nan_to_num(0.0).abs().max()) if values.numel() else 0.0


def spread(values: Tensor) -> float:
    """Std inside a group of [P, G], mean over the groups; in float64, since float32 has no square of 1e-23."""
    groups = [row[row.isfinite()].double() for row in values]
    return float(torch.stack([row.std(correction=0) for row in groups if len(row)] or [torch.zeros(())]).mean())
