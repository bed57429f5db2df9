"""G2RPO (Granular-GRPO): one stochastic step from a shared ODE path, each child scored at several step sizes.

    1. ODE to step k; G children leave by one SDE step; each goes on by the ODE once for every stride of `strides`,
       over every so-many-th node of the rest of the grid
    2. A(k, i) = sum over strides of (r - mean) / (std + eps) over the children of step k at that stride
    3. loss as Flow-GRPO on that step: one forward for all children of a step

E-GRPO is the same with `merge` above 1: the stochastic step spans so many grid steps, which joins steps of little
entropy into one of much. The ODE goes on after the merged step (the released code goes on one node after its start,
with too large a sigma).

Source: arXiv 2510.01982, 2601.00423; shengjun-zhang/VisualGRPO.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flowrl.algorithms._tree import NodeConfig, branching_steps, by_nodes, check_children, tree_plan
from flowrl.algorithms.base import EdgeMethod
from flowrl.algorithms.flow_grpo import ClippedOptions, clipped_loss
from flowrl.credit.advantages import Advantages
from flowrl.credit.tree_credit import LeafRewards, Scale, by_grain
from flowrl.diffusion.tree_shapes import Branching, least_way, offshoots

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedOptions):
    children: int = 12
    """G: children at each of the steps that branch."""
    steps: list[int] | None = None
    """Steps that may branch, counted from 0; null: of the first half of the grid those after which the
    strides differ."""
    steps_per_iteration: int | None = None
    """Number of them drawn in every iteration; null: all."""
    merge: int = 1
    """Grid steps that the stochastic step spans (E-GRPO)."""
    strides: list[int] = field(default_factory=lambda: [1, 2, 3])
    """Lambda: grid steps that one step after the branch spans; a child has a leaf for each."""
    advantages: NodeConfig = field(default_factory=NodeConfig)
    """`group` compares the weighted sum of the rewards, `per_reward` each by itself; `clip` bounds the result."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))
    """Comparison of the nodes of a step (`flowrl/credit/tree_credit.py`)."""

    def __post_init__(self) -> None:
        ClippedOptions.__post_init__(self)
        check_children(self.children, self.merge)
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise ValueError(f"strides={self.strides}: at least one, each at least 1, none twice")

    def every_step(self, num_steps: int) -> list[int]:
        """Steps that may branch."""
        last = num_steps - self.merge - least_way(self.strides)
        return list(range(min(num_steps // 2, last + 1))) if self.steps is None else self.steps

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        every, count = self.every_step(num_steps), self.steps_per_iteration
        steps = branching_steps(every, num_steps, self.merge, count, seed, iteration)
        return offshoots(num_steps, steps, self.children, tuple(self.strides), self.merge)


class G2rpo(EdgeMethod[Config]):
    plan = tree_plan
    loss = clipped_loss

    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        return by_nodes(credit, leaves, self.config.advantages, self.compare)

    def compare(self, total: Tensor, tree: Branching) -> Tensor:
        """Advantages of the edges [P, G, K] from the rewards of the leaves [P, G]."""
        return by_grain(total, tree, len(self.config.strides), self.config.scale)


build = G2rpo
