"""Warnings of iterations whose groups are all dead, from which nothing is learned: ever less often, with the cause."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.weighted import WeightedReward

_SAME_PX = 1e-6
"""Mean std of pixels inside a group, below which its images are the same."""


class DeadGroups:
    """Counts dead iterations in a row; `entries` are the trained rewards in the order of a rollout's rewards."""

    def __init__(self, entries: Sequence[WeightedReward]) -> None:
        self.entries, self.in_a_row = tuple(entries), 0

    def warning(self, rollout: Rollout, credit: Advantages) -> str | None:
        """A warning at the first, second, fourth, eighth ... dead iteration in a row; else None."""
        if not bool(credit.dead.all()):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        if self.in_a_row & (self.in_a_row - 1):
            return None
        times = "" if self.in_a_row == 1 else f", for {self.in_a_row} iterations in a row"
        what = "the only group" if len(credit.dead) == 1 else f"all {len(credit.dead)} groups"
        return f"{what} of this iteration dead{times}, so that nothing is learned from it: {self._why(rollout, credit)}"

    def _why(self, rollout: Rollout, credit: Advantages) -> str:
        size, most = rollout.rewards.shape[2], int(credit.valid.sum(dim=1).max())
        if not most:
            return "no sample has a score"
        if rollout.rewards[0].numel() == 1:
            return "one sample alone has nothing to be compared with; raise rollout.group_size"
        if most == 1 and size > 1:
            return "no prompt has two samples with a score; the others are masked"
        live = [(e, values) for e, values in zip(self.entries, rollout.rewards, strict=True) if e.weight != 0]
        return "; ".join(_cause(entry, values, rollout) for entry, values in live)


def _cause(entry: WeightedReward, values: Tensor, rollout: Rollout) -> str:
    """The cause that the training values [P, G] of a reward show, and its remedy."""
    name, card = f"reward {entry.name!r}", entry.reward.card
    outputs = [rollout.raw[output] for output in entry.shares()]
    if _differs(values):
        return f"{name} differs between samples, and the other rewards cancel that"
    if any(map(_differs, outputs)):
        return f"{name} differs between samples, and its clip or gate makes one training value of them; widen it"
    result = torch.cat([output[output.isfinite()] for output in outputs]).unique()
    if all(value in (card.low, card.high) for value in result.tolist()):
        ends = " or ".join(f"{value:g}" for value in result.tolist())
        return (
            f"{name} is saturated, with {ends}, an end of its range, for all images of a prompt; take prompts that "
            "the model solves now and then, or a reward with values in between"
        )
    if rollout.image_std < _SAME_PX:
        return "all images of a prompt are the same; raise rollout.sampler.noise_level, set rollout.shared_noise=false"
    if len(result) < 2:
        return f"{name} seems constant, with {result.item():g} for every image; does it use them?"
    return f"{name} gives all images of a prompt one value: it uses the prompt alone, or is too coarse"


def _differs(table: Tensor) -> bool:
    """True if the samples [P, G] of some prompt differ."""
    return any(row[row.isfinite()].unique().numel() > 1 for row in table)
