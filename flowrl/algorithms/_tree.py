"""Pieces of the methods on trees: their options, and credit by edge from the rewards of the leaves.

A prompt has `rollout.group_size` / leaves trees: its samples are their leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import by_steps
from flowrl.algorithms._options import Options
from flowrl.credit.advantages import Advantages, RuleConfig
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.tree_shapes import Branching, offshoots
from flowrl.diffusion.windows import subset


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class NodeOptions(Options):
    """Options of a method that compares the nodes of a step, in place of a rule for samples."""

    advantages: NodeConfig = field(default_factory=NodeConfig)
    """`group` compares the weighted sum of the rewards, `per_reward` each by itself; `clip` bounds the result."""


@dataclass(frozen=True, kw_only=True)
class OffshootOptions(Options):
    """A tree whose children leave one deterministic path."""

    children: int = 6
    """Children at each of the steps that branch."""
    steps: list[int] | None = None
    """Steps that may branch, counted from 0; null: all but the last."""
    steps_per_iteration: int | None = None
    """Number of them drawn in every iteration; null: all."""
    merge: int = 1
    """Grid steps that the stochastic step spans (E-GRPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.children < 2 or self.merge < 1:
            raise ValueError(f"children={self.children} must be at least 2 and merge={self.merge} at least 1")

    @property
    def grains(self) -> tuple[int, ...]:
        """Strides by which a child goes on, each to a leaf of its own."""
        return (1,)

    def every_step(self, num_steps: int) -> list[int]:
        """Steps that may branch."""
        return list(range(num_steps - self.merge)) if self.steps is None else self.steps

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        steps, last = self.every_step(num_steps), num_steps - 1 - self.merge
        if not steps or min(steps) < 0 or max(steps) > last:
            raise ValueError(
                f"steps={steps}, merge={self.merge}: of {num_steps} steps those can branch whose stochastic step ends "
                f"before the last one, 0..{last}"
            )
        drawn: Sequence[int] = steps
        if self.steps_per_iteration is not None:
            drawn = subset(num_steps, self.steps_per_iteration, seed, iteration, steps)
        return offshoots(num_steps, drawn, self.children, self.grains, self.merge)


# ---- credit


def by_nodes(
    credit: Advantages,
    leaves: LeafRewards,
    config: NodeConfig,
    compare: Callable[[Tensor, Branching], Tensor],
    left_out: Tensor | None = None,
) -> Advantages:
    """Credit by edge where an edge has the advantage of the node that it leads to.

    `credit` is that of the leaves, with who is valid and which groups are dead. `compare`: rewards of the leaves
    [P, G], NaN where masked, and their tree -> advantages of the edges [P, G, K]. `left_out`: edges that are not
    trained, [P, G, K] bool.
    """
    if config.name == "group":
        steps = compare(leaves.totals(credit.valid), leaves.tree)
    else:
        live = leaves.weights != 0
        share = (leaves.weights[live] / leaves.weights[live].abs().sum()).double()
        parts = [compare(torch.where(credit.valid, r, torch.nan), leaves.tree) for r in leaves.rewards[live]]
        steps = torch.stack([w * part for w, part in zip(share, parts, strict=True)]).sum(dim=0)
    return by_steps(credit, steps, config.clip, left_out)
