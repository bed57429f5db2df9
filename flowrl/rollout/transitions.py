"""Transitions of a run, kept over iterations, first in first out: the training data of DPOK."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Identity


@dataclass(frozen=True)
class Table:
    """n transitions on the CPU."""

    latents: Tensor
    """Latents before each transition, [n, ...]."""
    next_latents: Tensor
    """Latents after it, [n, ...]."""
    step: Tensor
    """Index into the plan, [n] int64."""
    old_log_prob: Tensor
    """Log-prob under the policy of its rollout, [n] float32."""
    reward: Tensor
    """Reward of the finished image, [n] float32."""
    prompt: Tensor
    """Number of its prompt, [n] int64."""

    def __len__(self) -> int:
        return len(self.step)

    def at(self, rows: Tensor | slice) -> "Table":
        """The transitions of `rows`."""
        return Table(**{name: column[rows] for name, column in vars(self).items()})

    @staticmethod
    def join(parts: "Sequence[Table]") -> "Table":
        """All of them, in order."""
        return Table(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})

    def tensors(self) -> dict[str, Tensor]:
        """The columns by name."""
        return dict(vars(self))


class Transitions:
    """The newest `capacity` transitions and their prompts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.table: Table | None = None
        self.prompts: list[Identity] = []

    def __len__(self) -> int:
        return 0 if self.table is None else len(self.table)

    def add(self, new: Table, prompts: Sequence[Identity]) -> None:
        """Add an iteration's transitions, whose `prompt` is a place in `prompts`; the oldest are dropped."""
        numbers = {prompt: k for k, prompt in enumerate(self.prompts)}
        for prompt in prompts:
            numbers.setdefault(prompt, len(numbers))
        own = torch.tensor([numbers[prompt] for prompt in prompts], dtype=torch.int64)
        renamed = Table(**(new.tensors() | {"prompt": own[new.prompt]}))
        whole = renamed if self.table is None else Table.join([self.table, renamed])
        kept = whole.at(slice(max(len(whole) - self.capacity, 0), None))
        # Prompts without a transition are dropped too.
        used, place = kept.prompt.unique(return_inverse=True)
        known = list(numbers)
        self.prompts = [known[k] for k in used.tolist()]
        self.table = Table(**(kept.tensors() | {"prompt": place}))

    def state(self) -> list[list[Any]]:
        """The prompts as plain data, for a checkpoint; `tensors` has the rest."""
        return [[text, list(images)] for text, images in self.prompts]

    def load_state(self, state: list[list[Any]]) -> None:
        self.prompts = [(text, tuple(images)) for text, images in state]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.table is None else self.table.tensors()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.table = Table(**tensors) if tensors else None
