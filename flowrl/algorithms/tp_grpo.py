"""TP-GRPO: every stochastic step of a chain is credited with what it added to the reward.

    1. chains of n stochastic steps, ODE elsewhere; from the end of each of them the ODE gives an image and its reward:
       R_t after t stochastic steps, R_0 of the ODE alone
    2. d_t = R_t - R_{t-1}, D = R_n - R_0; a turning point is where the sign of d_t begins to agree with D's
    3. step t's gain is D, plus d_t at a turning point (`gain: whole`, the released configurations); or d_t, and at a
       turning point from which the rewards go on in its direction R_n - R_{t-1} instead (`long_term`, the paper's idea
       as the released launch scripts have it); or d_t alone (`step`)
    4. A(t) = (gain - mean) / (std + 1e-4) over the chains of the prompt at step t, or over all their steps; loss as
       Flow-GRPO

DenseGRPO's credit is d_t alone, compared step by step; Stepwise-Flow-GRPO's is d_t of images that the ODE finishes in
five steps, compared over all steps of the prompt. A chain's d_t add up to D in both.

A chain is a tree of n + 1 leaves, so a prompt needs several of them.

Source: arXiv 2602.06422; YunzeTong/TurningPoint-GRPO; arXiv 2601.20218 (DenseGRPO); 2603.28718 (Stepwise). That
columns are compared by prompt is our presumption.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from flowrl.algorithms._options import RatioOptions
from flowrl.algorithms._tree import NodeOptions, by_nodes
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_positive
from flowrl.credit.advantages import Advantages
from flowrl.credit.tree_credit import Gain, LeafRewards, Scale, increments
from flowrl.diffusion.tree_shapes import Branching, completions
from flowrl.losses.batches import LossOutput, Microbatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(NodeOptions, ClipOptions, RatioOptions):
    least_trees: ClassVar[int] = 2

    window: int | None = None
    """n: stochastic steps, the first of the grid. Released: 9 for SD3, 5 or 6 for FLUX; null: all but the last, at most
    9."""
    gain: Gain = "whole"
    """Credit of a step: `whole` D, and more at turning points; `long_term` d_t, at turning points with what follows;
    `step` d_t alone."""
    turning: float = 1.0
    """Weight of d_t at a turning point next to D, for `whole`."""
    joint: bool = False
    """Whether a gain is compared with those of all steps of the prompt (Stepwise-Flow-GRPO), not of its step alone."""
    finish: int | None = None
    """Steps of the ODE from a node to its image, spread over the grid (Stepwise-Flow-GRPO: 5); null: all that are
    left."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))
    """Comparison of the nodes of a step (`flowrl/credit/tree_credit.py`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        require_positive(vars(self), "finish")
        if not math.isfinite(self.turning):
            raise ValueError(f"turning={self.turning} must be finite")
        if self.scale.pool != "prompt":
            raise OptionError("scale.pool=tree: a chain has one step of each number", {"scale.pool": "prompt"})

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        window = min(9, num_steps - 1) if self.window is None else self.window
        if window > num_steps - 1:
            raise ValueError(f"window={window} of {num_steps} steps: at most {num_steps - 1}, all but the last")
        return completions(num_steps, range(window), self.finish)


class TpGrpo(EdgeMethod[Config]):
    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        return by_nodes(credit, leaves, self.config.advantages, self.compare)

    def compare(self, total: Tensor, tree: Branching) -> Tensor:
        """Advantages of the edges [P, G, K] from the rewards of the leaves [P, G]."""
        config = self.config
        weight, scale = config.turning, config.scale
        return increments(total, tree, gain=config.gain, turning=weight, scale=scale, joint=config.joint)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = TpGrpo
