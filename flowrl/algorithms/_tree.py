"""Pieces of the methods on trees: the plan with its tree, and credit by edge from that of the leaves.

A prompt's samples are the leaves of its trees: `rollout.group_size` / leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import by_steps, leaf_advantages
from flowrl.algorithms.base import EdgeMethod
from flowrl.credit.advantages import AdvantageConfig, Advantages, RuleConfig, aggregate
from flowrl.credit.tree_credit import by_path, propagated
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import Branching
from flowrl.diffusion.windows import subset
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """How rewards are compared by a method that compares the nodes of a step by its `scale`."""

    name: Literal["group", "per_reward"] = "group"
    """`group` compares the weighted sum of the rewards, `per_reward` each by itself."""
    clip: float | None = 5.0
    """Bound on the absolute advantage; null for none."""

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> RuleConfig:
        """The rule that tells which groups have nothing to compare."""
        return AdvantageConfig(name=self.name, clip=self.clip)


# ---- the plan


def tree_plan(method: EdgeMethod[Any], schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
    """Stochastic and trained where the tree of the iteration is, deterministic elsewhere."""
    tree = method.config.tree(len(schedule), iteration, seed)
    assert tree is not None
    steps = [k for k, taken in enumerate(tree.stochastic) if taken]
    return replace(window(schedule, sampler.default_noise_level(), steps), tree=tree)


def branching_steps(
    steps: Sequence[int], num_steps: int, merge: int, count: int | None, seed: int, iteration: int
) -> Sequence[int]:
    """Steps at which children leave one deterministic path in an iteration.

    Args:
        steps: that may branch.
        num_steps: of the grid.
        merge: grid steps that the stochastic step spans.
        count: so many of them are drawn; None: all.
        seed: of the run.
        iteration: keys the draw.

    Raises:
        ValueError: they do not fit the grid.
    """
    if not steps or min(steps) < 0 or max(steps) + merge > num_steps - 1:
        raise ValueError(
            f"steps={steps}, merge={merge}: of {num_steps} steps those can branch whose stochastic step ends "
            f"before the last one, 0..{num_steps - 1 - merge}"
        )
    return steps if count is None else subset(num_steps, count, seed, iteration, steps)


def check_children(children: int, merge: int) -> None:
    if children < 2 or merge < 1:
        raise ValueError(f"children={children} must be at least 2 and merge={merge} at least 1")


# ---- credit


def tree_of(rollout: Rollout) -> Branching:
    assert rollout.plan.tree is not None
    return rollout.plan.tree


def path_weights(rollout: Rollout, beta: float) -> Tensor | None:
    """Weights of the leaves after each edge by the log-prob of the path to them, [P, G, K]; None: all alike."""
    return None if rollout.paths is None else by_path(rollout.paths, tree_of(rollout), beta)


def by_leaves(
    method: EdgeMethod[Any], credit: Advantages, rollout: Rollout, weights: Tensor, iteration: int
) -> Advantages:
    """An edge has the mean advantage of the leaves after it, by the advantage rule of the method."""
    paths = path_weights(rollout, method.config.path_weight)
    steps = propagated(leaf_advantages(credit), tree_of(rollout), paths)
    return by_steps(credit, steps, False, method.config.advantages.clip)


def by_nodes(
    credit: Advantages,
    rollout: Rollout,
    weights: Tensor,
    config: NodeConfig,
    compare: Callable[[Tensor, Branching], Tensor],
    left_out: Tensor | Literal[False] = False,
) -> Advantages:
    """An edge has the advantage of the node that it leads to.

    Args:
        credit: of the leaves; says who is valid, and which groups are dead.
        rollout: with its tree and rewards [R, P, G].
        weights: of the rewards, [R].
        config: of the comparison.
        compare: rewards of the leaves [P, G], NaN where masked, and their tree -> advantages of the edges [P, G, K].
        left_out: edges that are not trained, [P, G, K] bool.
    """
    tree = tree_of(rollout)
    if config.name == "group":
        steps = compare(totals(credit, rollout.rewards, weights), tree)
    else:
        live = weights != 0
        share = (weights[live] / weights[live].abs().sum()).double()
        parts = [compare(torch.where(credit.valid, r, torch.nan), tree) for r in rollout.rewards[live]]
        steps = torch.stack([w * part for w, part in zip(share, parts, strict=True)]).sum(dim=0)
    return by_steps(credit, steps, left_out, config.clip)


def totals(credit: Advantages, rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rewards, [P, G] float64, NaN where masked."""
    return torch.where(credit.valid, aggregate(rewards, weights), torch.nan)
