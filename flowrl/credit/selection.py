"""Groups, and samples of a group, that take part in the update: pure functions on rewards and scores [P, G]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import OptionError
from flowrl.core.tensors import ints
from flowrl.credit.groups import group_moments


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    name: Literal["best_worst", "variance"] = "best_worst"
    """`best_worst`: as many best as worst; `variance`: the samples whose advantages vary most."""
    keep: int
    """Samples per prompt that take part in the update."""

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ValueError(f"keep={self.keep}: at least 2 samples of a prompt are needed to compare them")
        if self.name == "best_worst" and self.keep % 2:
            raise OptionError(
                f"keep={self.keep}: best_worst takes as many best as worst samples",
                [{"keep": self.keep - 1}, {"keep": self.keep + 1}, {"name": "variance"}],
            )

    def check_group(self, group_size: int) -> None:
        """Refuse to keep more samples than a group has."""
        if self.keep > group_size:
            choices = range(2, group_size + 1, 2 if self.name == "best_worst" else 1)
            raise ValueError(
                f"advantages.select.keep={self.keep} is more than the {group_size} samples of a prompt; "
                f"use one of {', '.join(map(str, choices))}"
            )


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Groups that are trained, by mean and std of their weighted raw rewards (arXiv 2510.16888)."""

    least_std: float = 0.05
    """Groups with less are left out."""
    most_mean: float = 0.9
    """Groups with more are left out."""
    retire: bool = False
    """Prompts of groups with less std and more mean are not drawn again."""

    def useful(self, total: Tensor) -> Tensor:
        """Groups of the rewards [P, G] that are trained, [P] bool."""
        std, mean = group_moments(total)
        return (std > self.least_std) & (mean < self.most_mean)

    def retired(self, total: Tensor) -> Tensor:
        """Groups whose prompts are not drawn again, [P] bool."""
        std, mean = group_moments(total)
        # The std of a group that was scored only in part may be small for that reason.
        return (std < self.least_std) & (mean > self.most_mean) & total.isfinite().all(dim=1) & self.retire


def select(scores: Tensor, candidates: Tensor, config: SelectConfig) -> Tensor:
    """The samples of every group that the configured rule keeps, [P, G] bool; all of them candidates."""
    rule = best_and_worst if config.name == "best_worst" else most_varied
    return rule(scores, candidates, config.keep)


def best_and_worst(scores: Tensor, candidates: Tensor, keep: int) -> Tensor:
    """The keep / 2 best and keep / 2 worst candidates of every group, [P, G] bool; all of them where there are fewer.

    Source: arXiv 2505.07818, best-of-n.

    >>> best_and_worst(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool), 2).tolist()
    [[True, False, False, True]]
    """
    if keep % 2:
        raise ValueError(f"keep={keep} must be even: as many best as worst samples")
    return _extremes(scores, candidates, keep, range(keep // 2, keep // 2 + 1))


def most_varied(scores: Tensor, candidates: Tensor, keep: int) -> Tensor:
    """The `keep` candidates of every group whose scores have the largest variance, [P, G] bool.

    The variance is convex in each score, so the choice is the k largest and keep - k smallest, for some k.

    >>> most_varied(torch.tensor([[0.0, 0.1, 0.2, 9.0]]), torch.ones(1, 4, dtype=torch.bool), 3).tolist()
    [[True, True, False, True]]
    """
    # Ties go to the most balanced choice.
    return _extremes(scores, candidates, keep, sorted(range(keep + 1), key=lambda k: abs(2 * k - keep)))


def _extremes(scores: Tensor, candidates: Tensor, keep: int, counts: Sequence[int]) -> Tensor:
    """Of each group the k largest and keep - k smallest, for the k in `counts` with the largest variance."""
    chosen = candidates.clone()
    for row in ints((candidates.sum(dim=1) > keep).nonzero().flatten()):
        members = candidates[row].nonzero().squeeze(1)
        members = members[scores[row, members].argsort(stable=True)]
        choices = [torch.cat([members[: keep - k], members[len(members) - k :]]) for k in counts]
        best = max(choices, key=lambda choice: float(scores[row, choice].double().var(correction=0)))
        chosen[row] = False
        chosen[row, best] = True
    return chosen
