"""An advantage rule with its memory, credit where a critic follows, and that of a tree's edges."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages, RuleConfig, advantages, aggregate, unclipped
from flowrl.credit.history import RewardHistory, expected, moments, newest
from flowrl.credit.selection import FilterConfig


class Rule:
    """A configured advantage rule, and the groups that are trained. What it remembers belongs into the checkpoint."""

    def __init__(self, config: RuleConfig, groups: FilterConfig | None = None) -> None:
        self.config, self.groups = config, groups
        self.history = _memory(config)
        self.best: list[Tensor] | None = None
        """Highest value of each reward, where the rule has virtual samples."""
        self.past = 0
        """Iterations before this one, from which the k of `best_of` follows."""

    def __call__(
        self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = (), *, clipped: bool = True
    ) -> Advantages:
        """Credit of an iteration, computed once: its rewards [R, P, G] are remembered.

        `clipped` False gives it unclipped, with its bound.
        """
        if (spread := self.config.spreading()) is not None:
            rewards = spread.shared(rewards)
        known = self.best if self.history is None else self.history.add(prompts, aggregate(rewards, weights))
        config, best = self.config, self.config.best_of
        if best is not None:
            config, self.past = replace(config, best_of=best.at(self.past)), self.past + 1
        credit = (advantages if clipped else unclipped)(rewards, weights, config, known=known)
        if self.groups is None:
            return credit
        return replace(credit, kept=credit.kept & self.groups.useful(aggregate(rewards, weights))[:, None])

    def retired(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Prompts of an iteration that are not drawn again, [P] bool."""
        return (self.groups or FilterConfig()).retired(aggregate(rewards, weights))

    def state_dict(self) -> dict[str, Any]:
        own = {} if self.history is None else {"history": self.history.state()}
        return own | ({} if self.config.best_of is None else {"best_of": self.past})

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take the memory out of a method's state; the rest of it."""
        rest = dict(state)
        if self.history is not None and "history" in rest:
            self.history.load_state(rest.pop("history"))
        if self.config.best_of is not None:
            self.past = rest.pop("best_of", 0)
        return rest


def _memory(config: RuleConfig) -> RewardHistory | None:
    """What a rule remembers of earlier iterations, if anything."""
    if config.name == "smooth":
        return RewardHistory(partial(moments, ddof=config.ddof), 3)
    if (history := config.history) is not None and history.decay is not None:
        return RewardHistory(partial(expected, decay=history.decay), 3)
    return history and RewardHistory(partial(newest, size=history.buffer_size), history.min_count)


def plain_rewards(rewards: Tensor, weights: Tensor) -> Advantages:
    """Rewards as they are, for a method that subtracts the expectation of a critic later.

    Nothing is compared within a group, so no group is dead.
    """
    total = aggregate(rewards, weights)
    valid = total.isfinite()
    none = torch.zeros(len(total), dtype=torch.bool)
    return Advantages(values=total.nan_to_num().float()[:, :, None], valid=valid, dead=none, kept=valid)


def alike(rewards: Tensor) -> Advantages:
    """The credit 1 of every sample, whatever its rewards [R, P, G], for a method that they do not credit."""
    every = torch.ones(rewards.shape[1:], dtype=torch.bool)
    return Advantages(values=every.float()[:, :, None], valid=every, dead=~every.all(dim=1), kept=every)


def given_signs(rewards: Tensor, graded: bool = False) -> Advantages:
    """Credit of given images: their rewards 1 and 0, [1, P, G], as signs +1 and -1.

    A slot of which one sample is missing (NaN) is left out whole. `graded` pairs have any rewards, their chosen sample
    first; it has the sign +1 in a tie too, and their difference is the margin.
    """
    reward = rewards[0].float()
    valid = reward.isfinite()
    whole = valid.all(dim=1)
    signs = torch.where(valid, reward.new_tensor([1.0, -1.0]) if graded else 2 * reward - 1, 0.0)
    margin = torch.where(whole, reward[:, 0] - reward[:, 1], 0.0) if graded else None
    kept = whole[:, None].expand_as(valid).clone()
    return Advantages(values=signs[:, :, None], valid=valid, dead=~whole, kept=kept, margin=margin)


def imitation(weights: Tensor, total: Tensor) -> Advantages:
    """Credit of a method that imitates: weights [P, G] of rewards `total` [P, G]; those of weight 0 take no part.

    A group of equal rewards is not dead: it is imitated as it is.
    """
    valid = total.isfinite()
    dead = torch.zeros(len(total), dtype=torch.bool)
    return Advantages(values=weights.float()[:, :, None], valid=valid, dead=dead, kept=valid & (weights > 0))


def leaf_advantages(credit: Advantages) -> Tensor:
    """[P, G] float64, NaN where a sample takes no part: masked, of a dead group, left out by rule or selection."""
    return torch.where(credit.kept, credit.values.squeeze(2).double(), torch.nan)


def by_steps(
    credit: Advantages, steps: Tensor, clip: float | None = None, left_out: Tensor | None = None
) -> Advantages:
    """Credit of the leaves with that of their edges, `steps` [P, G, K] within +-clip.

    NaN, edges `left_out` [P, G, K] and those of groups without a sample that is kept are not trained.
    """
    if clip is not None:
        steps = steps.clamp(-clip, clip)
    pruned = steps.isnan() | ~credit.kept.any(dim=1)[:, None, None]
    return replace(credit, steps=steps.float(), pruned=pruned if left_out is None else pruned | left_out)
