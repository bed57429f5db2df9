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

from dataclasses import dataclass, field

from torch import Tensor

from flowrl.algorithms._options import RatioOptions
from flowrl.algorithms._tree import NodeOptions, OffshootOptions, by_nodes
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.credit.advantages import Advantages
from flowrl.credit.tree_credit import LeafRewards, Scale, by_grain
from flowrl.diffusion.tree_shapes import Branching, steps_to_differ
from flowrl.losses.batches import LossOutput, Microbatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(OffshootOptions, NodeOptions, ClipOptions, RatioOptions):
    children: int = 12
    steps: list[int] | None = None
    """Steps that may branch, counted from 0; null: of the first half of the grid those after which the
    strides differ."""
    strides: list[int] = field(default_factory=lambda: [1, 2, 3])
    """Lambda: grid steps that one step after the branch spans; a child has a leaf for each."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))
    """Comparison of the nodes of a step (`flowrl/credit/tree_credit.py`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise ValueError(f"strides={self.strides}: at least one, each at least 1, none twice")

    @property
    def grains(self) -> tuple[int, ...]:
        return tuple(self.strides)

    def every_step(self, num_steps: int) -> list[int]:
        last = num_steps - self.merge - steps_to_differ(self.strides)
        return list(range(min(num_steps // 2, last + 1))) if self.steps is None else self.steps


class G2rpo(EdgeMethod[Config]):
    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        return by_nodes(credit, leaves, self.config.advantages, self.compare)

    def compare(self, total: Tensor, tree: Branching) -> Tensor:
        """Advantages of the edges [P, G, K] from the rewards of the leaves [P, G]."""
        return by_grain(total, tree, len(self.config.strides), self.config.scale)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = G2rpo
