"""Baselines of the rule `batch`: the batch, or the rewards of the prompt in this and earlier iterations.

Source: arXiv 2305.13301; kvablack/ddpo-pytorch:ddpo_pytorch/stat_tracking.py, scripts/train.py.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import OptionError, Remedy
from flowrl.core.tensors import floats
from flowrl.core.types import Identity


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    buffer_size: int = 16
    """Newest rewards of a prompt that are kept."""
    min_count: int = 16
    """Least number of them; with fewer a prompt is compared with the batch."""

    def __post_init__(self) -> None:
        if self.min_count < 2:
            raise ValueError(f"min_count={self.min_count} must be at least 2: one reward has no spread")
        if self.min_count > self.buffer_size:
            raise OptionError(
                f"min_count={self.min_count} is more than buffer_size={self.buffer_size} holds: every prompt would "
                "always be compared with the batch",
                remedies=[Remedy({"min_count": self.buffer_size}), Remedy({"algorithm.advantages.history": None})],
            )


class RewardHistory:
    """The newest rewards of every prompt that was drawn, keyed by its whole text and its images.

    The official code's key is the text's first 77 tokens, where longer prompts may collide.
    """

    def __init__(self, config: HistoryConfig) -> None:
        self.config = config
        self.rewards: dict[Identity, deque[float]] = {}

    def add(self, prompts: Sequence[Identity], total: Tensor) -> list[Tensor | None]:
        """Remember the rewards [P, G] of an iteration, NaN left out; then what each prompt is to be compared with.

        Returns:
            For each slot the prompt's rewards [n] float64, this iteration's among them, or None where there are fewer
            than `min_count`. Slots of one prompt share them.

        Raises ValueError: there is not one prompt for each row.
        """
        if len(prompts) != len(total):
            raise ValueError(f"advantages.history must know the prompts of {len(total)} groups, and got {len(prompts)}")
        for prompt, row in zip(prompts, total.double(), strict=True):
            own = self.rewards.setdefault(prompt, deque(maxlen=self.config.buffer_size))
            own.extend(floats(row[row.isfinite()]))
        known = [self.rewards[prompt] for prompt in prompts]
        return [torch.tensor(x, dtype=torch.float64) if len(x) >= self.config.min_count else None for x in known]

    def state(self) -> list[list[Any]]:
        """Plain data; numbers come back from JSON to the last bit."""
        return [[text, list(images), list(own)] for (text, images), own in self.rewards.items()]

    def load_state(self, state: list[list[Any]]) -> None:
        """Inverse of `state`."""
        self.rewards = {
            (text, tuple(images)): deque(own, maxlen=self.config.buffer_size) for text, images, own in state
        }


def normalise_against(
    total: Tensor, past: Sequence[Tensor | None] | None, *, eps: float, ddof: int = 0, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """(reward - mean) / (std + eps) of rewards [P, G], NaN masked.

    Args:
        total: one reward per sample.
        past: for each prompt the rewards [n] whose mean and std are taken; None: those of the whole iteration.
        eps: added to the std.
        ddof: 0 divides by n.
        scaled: False divides by nothing.

    Returns:
        [P, G] float64, 0 where masked, and [P] bool: prompts that are compared with equal rewards only, exactly 0.

    >>> normalise_against(torch.tensor([[0.0], [2.0]]), [None, torch.tensor([1.0, 3.0])], eps=0.0)[0].flatten().tolist()
    [-1.0, 0.0]
    """
    total = total.double()
    valid, values = total.isfinite(), torch.zeros_like(total)
    dead = torch.ones(len(total), dtype=torch.bool)
    for slot, own in enumerate([None] * len(total) if past is None else past):
        known = total[valid] if own is None else own.double()
        if len(known) and bool(known.max() > known.min()):
            scale = known.std(correction=ddof) + eps if scaled else 1.0
            values[slot], dead[slot] = (total[slot] - known.mean()) / scale, False
    return torch.where(valid, values, 0.0), dead
