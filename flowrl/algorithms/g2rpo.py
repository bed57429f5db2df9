"""G2RPO (Granular-GRPO): one stochastic step from a shared ODE way, each child judged at several step sizes.

    1. ODE to step k; G children leave by one SDE step; each goes on by the ODE once for every stride of `strides`,
       over every so-many-th node of the rest of the grid
    2. A(k, i) = sum over strides of (r - mean) / (std + eps) over the children of step k at that stride
    3. loss as Flow-GRPO on that step: one forward for all children of a step

E-GRPO is the same with `merge` above 1: the stochastic step spans so many grid steps, which joins steps of little
entropy into one of much. The ODE goes on behind the merged step (the released code goes on one node behind its start,
with too large a sigma).

Source: arXiv 2510.01982, 2601.00423; shengjun-zhang/VisualGRPO.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flowrl.algorithms._tree import DepthwiseGrpo, OffshootConfig
from flowrl.credit import tree_credit as credit_on
from flowrl.credit.tree_credit import Scale
from flowrl.diffusion.tree_shapes import Branching, least_way

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(OffshootConfig):
    children: int = 12
    """G: children at each of the steps that branch."""
    strides: list[int] = field(default_factory=lambda: [1, 2, 3])
    """Lambda: grid steps that one step behind the branch spans; a child has a leaf for each."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))

    def __post_init__(self) -> None:
        OffshootConfig.__post_init__(self)
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise ValueError(f"strides={self.strides}: at least one, each at least 1, none twice")

    def every_step(self, num_steps: int) -> list[int]:
        """Where they are not given, of the first half of the grid those behind which the strides differ."""
        last = num_steps - self.merge - least_way(self.strides)
        return list(range(min(num_steps // 2, last + 1))) if self.steps is None else self.steps

    def strides_of_children(self) -> tuple[int, ...]:
        return tuple(self.strides)


class G2rpo(DepthwiseGrpo[Config]):
    level = LEVEL

    def compared(self, total: Tensor, tree: Branching, paths: Tensor | None) -> Tensor:
        return credit_on.by_grain(total, tree, len(self.config.strides), self.config.scale)


def build(config: Config) -> G2rpo:
    return G2rpo(config)
