"""Warnings of iterations from which nothing is learned, ever less often, with the cause: all groups are dead, or the
credit is that of rewards of far too small a scale."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.weighted import WeightedReward
from flowrl.statistics.scales import FAINT, scale_up
from flowrl.training.metrics import largest, spread

_SAME_PX = 1e-6
"""Mean std of pixels inside a group, below which its images are the same."""


class DeadGroups:
    """Counts dead and faint iterations in a row; `entries` are the trained rewards in the order of a rollout's."""

    def __init__(self, entries: Sequence[WeightedReward]) -> None:
        self.entries, self.in_a_row, self.faint_in_a_row = tuple(entries), 0, 0

    def warning(self, rollout: Rollout, credit: Advantages) -> str | None:
        """A warning at the first, second, fourth, eighth ... dead, or faint, iteration in a row; else None."""
        dead = bool(credit.dead.all())
        faint = not dead and largest(credit) < FAINT
        self.in_a_row, self.faint_in_a_row = (self.in_a_row + 1) * dead, (self.faint_in_a_row + 1) * faint
        count = self.in_a_row or self.faint_in_a_row
        if not count or count & (count - 1):
            return None
        times = "" if count == 1 else f", for {count} iterations in a row"
        if faint:
            return self._faint(rollout, largest(credit), times)
        what = "the only group" if len(credit.dead) == 1 else f"all {len(credit.dead)} groups"
        return f"{what} of this iteration dead{times}, so that nothing is learned from it: {self._why(rollout, credit)}"

    def _faint(self, rollout: Rollout, most: float, times: str) -> str:
        """What is said of rewards of a small scale."""
        told = []
        for place, (entry, values) in enumerate(zip(self.entries, rollout.rewards, strict=True)):
            std = spread(values) or spread(values.reshape(1, -1))  # groups of one are compared with the others
            if entry.weight and std > 0:
                factor = entry.transform()[0] * scale_up(std)
                told.append(
                    f"reward {entry.name!r} differs by {std:.2g} (rewards.{place}.scale={factor:g} makes that 1)"
                )
        return (
            f"the advantages of this iteration{times} are {most:.2g} or less, where 1 is usual, so that next to "
            "nothing is learned from it: the scale of the rewards is too small, and not the learning rate; inside a "
            f"group {' and '.join(told)}"
        )

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
            f"{name} is saturated, with {ends}, an end of its range, for all samples of a prompt; take prompts that "
            "the model solves now and then, or a reward with values in between"
        )
    if rollout.image_std < _SAME_PX:
        return "all samples of a prompt are the same; raise rollout.sampler.noise_level, set rollout.shared_noise=false"
    if len(result) < 2:
        return f"{name} seems constant, with {result.item():g} for every sample; does it look at them?"
    return f"{name} gives all samples of a prompt one value: it uses the prompt alone, or is too coarse"


def _differs(table: Tensor) -> bool:
    """True if the samples [P, G] of some prompt differ."""
    return any(row[row.isfinite()].unique().numel() > 1 for row in table)
