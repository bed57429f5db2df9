"""Pieces of the methods on trees: the plan with its tree, and credit by edge from the rewards of the leaves.

A prompt has `rollout.group_size` / leaves trees: its samples are their leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import by_steps
from flowrl.algorithms.base import EdgeMethod
from flowrl.credit.advantages import Advantages, RuleConfig
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import Branching
from flowrl.diffusion.windows import subset
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """The rewards that a method compares between the nodes of a step, by its `scale`."""

    name: Literal["group", "per_reward"] = "group"
    """`group` compares the weighted sum of the rewards, `per_reward` each by itself."""
    clip: float | None = 5.0
    """Bound on the absolute advantage; null for none."""

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> RuleConfig:
        """The rule by which a group has nothing to compare."""
        return RuleConfig(name=self.name, clip=self.clip)


# ---- the plan


def tree_plan(self: EdgeMethod[Any], schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
    """Stochastic and trained where the tree of the iteration is, deterministic elsewhere."""
    tree = self.config.tree(len(schedule), iteration, seed)
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
        count: steps that are drawn from `steps`; None: all.
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


def by_nodes(
    credit: Advantages,
    leaves: LeafRewards,
    config: NodeConfig,
    compare: Callable[[Tensor, Branching], Tensor],
    left_out: Tensor | None = None,
) -> Advantages:
    """Credit by edge where an edge has the advantage of the node that it leads to.

    Args:
        credit: of the leaves, with who is valid and which groups are dead.
        leaves: rewards of the leaves.
        config: of the comparison.
        compare: rewards of the leaves [P, G], NaN where masked, and their tree -> advantages of the edges [P, G, K].
        left_out: edges that are not trained, [P, G, K] bool.
    """
    if config.name == "group":
        steps = compare(leaves.totals(credit.valid), leaves.tree)
    else:
        live = leaves.weights != 0
        share = (leaves.weights[live] / leaves.weights[live].abs().sum()).double()
        parts = [compare(torch.where(credit.valid, r, torch.nan), leaves.tree) for r in leaves.rewards[live]]
        steps = torch.stack([w * part for w, part in zip(share, parts, strict=True)]).sum(dim=0)
    return by_steps(credit, steps, config.clip, left_out)
