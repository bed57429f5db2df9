"""A stage of training that resumes: weights, their average and Adam's moments in one safetensors file.

A stage draws its data from (seed, step), so that its file holds no state of a generator, and a stage that was stopped
goes on to the same weights, bit for bit, on the same number of processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.pretraining.training import all_reduce_gradients, log

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
SHOWN_EVERY = 25


class Stage:
    """One optimisation, of groups of modules, each with its own peak learning rate."""

    def __init__(self, groups: Sequence[tuple[Sequence[nn.Module], float]], *, average: float, processes: int) -> None:
        self.parameters: list[nn.Parameter] = []
        rates = []
        for modules, peak in groups:
            own = [p for module in modules for p in module.parameters()]
            self.parameters += own
            rates.append({"params": own, "peak": peak, "lr": peak})
        self.optimizer = torch.optim.AdamW(rates, betas=(0.9, 0.98), weight_decay=0.0)
        self.average = [p.detach().clone() for p in self.parameters]
        self._average, self._processes = average, processes

    def update(self, loss: Tensor, step: int, share: float) -> None:
        """One step, the `step`-th from 1, at this share of the peak learning rates."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        all_reduce_gradients(self.parameters, self._processes)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        decay = min(self._average, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the averages in place of the weights, which come back as they were, bit for bit."""
        kept = [p.detach().clone() for p in self.parameters]
        self.finish()
        try:
            yield
        finally:
            for p, value in zip(self.parameters, kept, strict=True):
                p.data.copy_(value)

    def save(self, file: Path, step: int, facts: dict[str, Any]) -> None:
        """Everything that the next step needs; a file that is there is whole."""
        tensors = {}
        for i, (p, mean) in enumerate(zip(self.parameters, self.average, strict=True)):
            tensors |= {f"{i}.weight": p.detach().contiguous(), f"{i}.average": mean}
            tensors |= {f"{i}.{name}": self.optimizer.state[p][name] for name in MOMENTS}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"done": str(step), "facts": json.dumps(facts, sort_keys=True)})
        os.replace(partial, file)

    def load(self, file: Path, facts: dict[str, Any]) -> int:
        """The number of steps that are done; 0 where there is no file.

        Raises:
            SystemExit: the file is of other settings.
        """
        if not file.exists():
            return 0
        with safe_open(file, "pt") as held:
            metadata = held.metadata()
            check_facts(file, json.loads(metadata["facts"]), facts)
            state = {}
            for i, (p, mean) in enumerate(zip(self.parameters, self.average, strict=True)):
                p.data.copy_(held.get_tensor(f"{i}.weight"))
                mean.copy_(held.get_tensor(f"{i}.average"))
                state[i] = {name: held.get_tensor(f"{i}.{name}") for name in MOMENTS}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        return int(metadata["done"])

    def finish(self) -> None:
        """Put the averages in place of the weights."""
        for p, mean in zip(self.parameters, self.average, strict=True):
            p.data.copy_(mean)


def check_facts(file: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on from a file of other settings, naming the first that differs."""
    wanted = json.loads(json.dumps(wanted))
    for key in sorted(held.keys() | wanted.keys()):
        if held.get(key) != wanted.get(key):
            raise SystemExit(
                f"{file}: its {key}={held.get(key)!r}, but {key}={wanted.get(key)!r} is asked for; ask for the former, "
                "or remove the file to start anew"
            )


def ramp(step: int, steps: int, *, warm: int, decay_from: float) -> float:
    """Share of the peak learning rate: a linear start, then flat, then linear to 0."""
    return min(1.0, step / warm, max((1 - step / steps) / (1 - decay_from), 0.0))


class Told:
    """A line every few steps: the smoothed loss and the time of a step."""

    def __init__(self, rank: int, name: str, steps: int) -> None:
        self._rank, self._name, self._steps = rank, name, steps
        self._shown, self._started, self._count = 0.0, time.time(), 0

    def add(self, step: int, loss: float) -> None:
        self._shown = loss if self._count == 0 else 0.95 * self._shown + 0.05 * loss
        self._count += 1
        if step % SHOWN_EVERY == 0 or step == self._steps:
            pace = (time.time() - self._started) / self._count
            log(self._rank, f"{self._name} {step}/{self._steps} loss {self._shown:.4f} {pace:.3f} s/step")
            self._started, self._count = time.time(), 0
