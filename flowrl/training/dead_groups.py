"""An iteration whose groups are all dead teaches nothing: told at first, then ever less often, with its cause."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.weighted import WeightedReward

_SAME_PX = 1e-6
"""Mean std of pixels inside a group, below which its pictures are the same."""


class DeadGroups:
    """Looks at one iteration after another.

    Args:
        entries: the rewards that are trained on, in the order of a rollout's rewards.
    """

    def __init__(self, entries: Sequence[WeightedReward]) -> None:
        self.entries, self.in_a_row = tuple(entries), 0

    def look(self, rollout: Rollout, credit: Advantages) -> str | None:
        """What to tell at the first, the second, the fourth, the eighth ... of a row of dead iterations; else None."""
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
        return "; ".join(_looks(entry, values, rollout) for entry, values in live)


def _looks(entry: WeightedReward, values: Tensor, rollout: Rollout) -> str:
    """What a reward with training values [P, G] looks like."""
    name, card = f"reward {entry.name!r}", entry.reward.card
    outputs = [rollout.raw[output] for output in entry.shares()]
    if _differs(values):
        return f"{name} tells samples apart, and the other rewards take that back"
    if any(map(_differs, outputs)):
        return f"{name} tells samples apart, and its clip or gate makes one training value of them; widen it"
    result = torch.cat([output[output.isfinite()] for output in outputs]).unique()
    if all(value in (card.low, card.high) for value in result.tolist()):
        ends = " or ".join(f"{value:g}" for value in result.tolist())
        return (
            f"{name} is saturated, with {ends}, an end of its range, for all pictures of a prompt; take prompts that "
            "the model solves now and then, or a reward with values in between"
        )
    if rollout.image_std < _SAME_PX:
        return "all pictures of a prompt are alike; raise rollout.sampler.noise_level, set rollout.shared_noise=false"
    if len(result) < 2:
        return f"{name} looks constant, with {result.item():g} for every picture; does it look at them?"
    return f"{name} gives all pictures of a prompt one value: it looks at the prompt alone, or is too coarse"


def _differs(table: Tensor) -> bool:
    """Whether some prompt's samples differ in [P, G]."""
    return any(row[row.isfinite()].unique().numel() > 1 for row in table)
