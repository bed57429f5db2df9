"""BranchGRPO: rollouts of a prompt are the leaves of a tree; leaf rewards are fused upward and compared by depth.

    1. one root noise for a tree; every step but the last with the Dance-SDE; at a split step a node has K children,
       whose noises share a part: xi_b = (xi_0 + s eta_b) / sqrt(1 + s^2), each standard normal by itself
    2. r(n) = mean reward of the leaves after node n
    3. A(n) = (r(n) - mean) / (std + 1e-8) over the nodes of the same step of the tree, clipped to +-5; an edge has the
       advantage of its child
    4. leave edges out (pruning), and train the others: loss = max(-A ratio, -A clamp(ratio, 1 - c, 1 + c))

Variants: `prune` after the last split by parent or to the extreme leaves (width), `depth` for a window of steps, `mix`
for the ODE at all steps but splits and a window. The last step is deterministic, so the decoded latent is its x0_hat,
as in the released code, which trains that step nevertheless.

Source: arXiv 2509.06040; Fredreic1849/BranchGRPO. The released code differs from the paper twice: it draws the
children of a split with a std four times that of their density (`split_inflation` does so with the density to match),
and its width pruning by branch keeps the earliest half of each suffix (here: the paper's).
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import PathOptions, RatioOptions, clip_bounds
from flowrl.algorithms._tree import NodeOptions, by_nodes
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.core.errors import OptionError, Remedy
from flowrl.core.strict import require_positive
from flowrl.credit.advantages import Advantages
from flowrl.credit.tree_credit import DepthWindow, LeafRewards, Scale, depthwise, extremes, fuse, parent_top1
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import Branching, splits
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"
_PRESET = {"dance_sde": 1e-3}
"""Sampler -> published clip range of this method; with others that of the family."""


@dataclass(frozen=True, kw_only=True)
class Config(NodeOptions, PathOptions, ClipOptions, RatioOptions):
    default_sampler: ClassVar[str] = "dance_sde"

    scale: Scale = field(default_factory=Scale)
    """Comparison of the nodes of a step (`flowrl/credit/tree_credit.py`)."""
    splits: list[int] | None = None
    """Steps at which every node has `children` children; null: 0, 3, 6, 9 of 20 steps, scaled to the run's grid."""
    children: int = 2
    """K; a tree has K to the number of splits leaves."""
    spread: float | None = 4.0
    """s: share of their own in the siblings' noises, whose correlation is 1 / (1 + s^2); null: independent."""
    split_inflation: float = 1.0
    """Compatibility: 4 repeats the released code's wider steps at splits, which leave the model's marginals."""
    prune: Literal["parent_top1", "extremes"] | None = None
    """Edges kept after the last split: of each parent's best child, or of the best and worst leaves; null: all."""
    keep: int = 4
    """Best leaves of a tree that `extremes` keeps, and as many worst ones."""
    depth: DepthWindow | None = None
    """Window of steps that are not trained (depth pruning); null: none."""
    mix: MixWindow | None = None
    """Splits and this window are stochastic and trained, all other steps ODE. The released window never moves:
    {strategy: frozen, size: 4}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"spread={self.spread} must be a number of at least 0, or null for independent siblings")
        require_positive(vars(self), "split_inflation", "keep")
        given = self.splits
        if (given is not None and (not given or len(set(given)) < len(given))) or self.children < 2:
            raise ValueError(
                f"splits={given}, children={self.children}: at least one split, none twice, and 2 children"
            )

    def clip(self, sampler: Sampler) -> tuple[float, float]:
        preset = _PRESET.get(sampler.name) if self.clip_range is None else None
        return super().clip(sampler) if preset is None else clip_bounds(preset)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        if self.split_inflation != 1 and sampler.log_prob_form == "unscaled":
            raise OptionError(
                f"split_inflation={self.split_inflation}: the sampler's log-prob form 'unscaled' leaves the std out, "
                "so no density matches the wider steps",
                {"split_inflation": 1.0},
            )

    def split_steps(self, num_steps: int) -> list[int]:
        """Steps at which nodes split.

        >>> [Config().split_steps(count) for count in (20, 10, 6)]
        [[0, 3, 6, 9], [0, 2, 3, 4], [0, 1, 2, 3]]
        """
        if self.splits is not None:
            return self.splits
        return sorted({min(round(place * num_steps / 20), num_steps - 2) for place in (0, 3, 6, 9)})

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        steps = self.split_steps(num_steps)
        if min(steps) < 0 or max(steps) > num_steps - 2:
            raise ValueError(f"splits={steps}: of {num_steps} steps 0..{num_steps - 2} can split")
        noisy = set(range(num_steps - 1))
        if self.mix is not None:
            noisy = {*steps, *mix_window(self.mix, num_steps, seed, iteration)}
        result = splits(num_steps, dict.fromkeys(steps, self.children), noisy)
        if self.prune == "extremes" and not 1 <= 2 * self.keep <= result.leaves:
            raise ValueError(f"keep={self.keep} best and worst of {result.leaves} leaves")
        if self.depth is not None:
            self.depth.check(result)
        last = num_steps - 2 if self.mix is None else self.mix.last(num_steps)
        if self.prune is not None and last <= max(steps):
            whole = [Remedy({"mix": None})] if max(steps) < num_steps - 2 else []
            raise OptionError(
                f"prune={self.prune}: after the last split, step {max(steps)}, no step is trained in any iteration",
                [{"prune": None}, *whole],
            )
        return result


class BranchGrpo(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        result = super().plan(schedule, sampler, iteration, seed)
        return replace(result, sibling_noise=self.config.spread, inflation=self.config.split_inflation)

    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        config, paths = self.config, leaves.path_weights(self.path_weight)

        def compare(total: Tensor, tree: Branching) -> Tensor:
            return depthwise(fuse(total, tree, paths), total, tree, config.scale)

        left_out = self.pruned(leaves.totals(credit.valid), leaves.tree, iteration)
        return by_nodes(credit, leaves, config.advantages, compare, left_out)

    def pruned(self, total: Tensor, tree: Branching, iteration: int) -> Tensor:
        """Edges that are left out by the rewards [P, G] of the leaves, [P, G, K] bool."""
        config = self.config
        left_out = torch.zeros(*total.shape, tree.num_steps, dtype=torch.bool)
        if config.depth is not None:
            left_out[..., list(config.depth.steps(tree, iteration))] = True
        if config.prune == "parent_top1":
            left_out |= parent_top1(fuse(total, tree), tree)
        elif config.prune == "extremes":
            left_out |= extremes(total, tree, config.keep)
        return left_out

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = BranchGrpo
