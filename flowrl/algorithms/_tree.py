"""What methods on trees share: options, the plan with its tree, and credit by edge that the updates take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms._credit import by_steps, leaf_advantages
from flowrl.algorithms._grpo import ClippedConfig, ClippedGrpo
from flowrl.credit import tree_credit as credit_on
from flowrl.credit.advantages import AdvantageConfig, Advantages, aggregate
from flowrl.credit.tree_credit import Scale
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import Branching, offshoots
from flowrl.diffusion.windows import subset
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeConfig(ClippedConfig):
    """Options of the methods here. A prompt's samples are the leaves of its trees: `rollout.group_size` / leaves."""

    WINDOWED: ClassVar[bool] = True

    path_weight: float = 0.0
    """beta: leaves behind an edge count by exp(beta z), z how likely the way to them was among them (standardised
    log-prob); 0: all alike."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.advantages.select is not None:
            raise ValueError(
                "advantages.select picks samples, and the edges of a tree belong to several; set it to null"
            )

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        """Of an iteration.

        Raises:
            ValueError: it does not fit the grid, naming the key.
        """
        raise NotImplementedError

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedConfig.check(self, sampler, num_steps)
        self.tree(num_steps, 1, 0)

    def leaves(self, num_steps: int) -> int:
        return self.tree(num_steps, 1, 0).leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthwiseConfig(TreeConfig):
    """Options of the methods that compare the nodes of a step with each other."""

    scale: Scale = field(default_factory=Scale)
    """How nodes are compared (`flowrl/credit/tree_credit.py`)."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """`group` compares the weighted sum of the rewards, `per_reward` each by itself; `clip` bounds the result. `std`,
    `eps` and `ddof` are those of `scale`."""

    def __post_init__(self) -> None:
        TreeConfig.__post_init__(self)
        rule = self.advantages
        if rule.name not in ("group", "per_reward") or rule.trimmed_ratio:
            raise ValueError(
                f"advantages: {rule.name} with trimmed_ratio={rule.trimmed_ratio}: this method compares nodes by its "
                "scale; use the rule group or per_reward, with trimmed_ratio=0"
            )
        for name in ("std", "eps", "ddof"):
            if getattr(rule, name) != getattr(AdvantageConfig(), name):
                raise ValueError(
                    f"advantages.{name}={getattr(rule, name)}: this method compares nodes by its scale; leave it out, "
                    "and set algorithm.scale"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class OffshootConfig(DepthwiseConfig):
    """Options of the methods whose children leave one deterministic way."""

    children: int = 6
    """k: children at each of the steps that branch."""
    steps: list[int] | None = None
    """Steps that may branch, counted from 0; null: all but the last."""
    steps_per_iteration: int | None = None
    """So many of them are drawn in every iteration; null: all."""
    merge: int = 1
    """Grid steps that the stochastic step spans (E-GRPO)."""

    def __post_init__(self) -> None:
        DepthwiseConfig.__post_init__(self)
        if self.children < 2 or self.merge < 1:
            raise ValueError(f"children={self.children} must be at least 2 and merge={self.merge} at least 1")
        if self.path_weight:
            raise ValueError(f"path_weight={self.path_weight}: no stochastic step follows the branch; set it to 0")

    def every_step(self, num_steps: int) -> list[int]:
        """Those that may branch."""
        return list(range(num_steps - self.merge)) if self.steps is None else self.steps

    def strides_of_children(self) -> tuple[int, ...]:
        """Ways to the end that each child takes."""
        return (1,)

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        steps = self.every_step(num_steps)
        if not steps or min(steps) < 0 or max(steps) + self.merge > num_steps - 1:
            raise ValueError(
                f"steps={steps}, merge={self.merge}: of {num_steps} steps those can branch whose stochastic step ends "
                f"before the last one, 0..{num_steps - 1 - self.merge}"
            )
        if self.steps_per_iteration is not None:
            steps = list(subset(num_steps, self.steps_per_iteration, seed, iteration, steps))
        return offshoots(num_steps, steps, self.children, self.strides_of_children(), self.merge)


C = TypeVar("C", bound=TreeConfig)
D = TypeVar("D", bound=DepthwiseConfig)


class TreeGrpoBase(ClippedGrpo[C]):
    """A method whose plan branches. Its file says where, and what an edge is credited with."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        tree = self.config.tree(len(schedule), iteration, seed)
        steps = [k for k, taken in enumerate(tree.stochastic) if taken]
        return replace(window(schedule, sampler.default_noise_level(), steps), tree=tree)

    def on_tree(self, credit: Advantages, rollout: Rollout, weights: Tensor, iteration: int) -> Advantages:
        tree = rollout.plan.tree
        assert tree is not None
        paths = None
        if rollout.paths is not None:
            paths = credit_on.by_path(rollout.paths, tree, self.config.path_weight)
        steps = self.credited(credit, rollout.rewards, weights, tree, paths)
        left_out = self.pruned(credit, rollout.rewards, weights, tree, iteration)
        return by_steps(credit, steps, left_out, self.config.advantages.clip)

    def credited(
        self, credit: Advantages, rewards: Tensor, weights: Tensor, tree: Branching, paths: Tensor | None
    ) -> Tensor:
        """[P, G, K] float64 of each leaf's edges, NaN where there is none to be trained.

        Args:
            credit: of the leaves, by the advantage rule.
            rewards: [R, P, G].
            weights: [R].
            tree: of the rollout.
            paths: weights of the leaves behind each edge, [P, G, K]; None: all alike.
        """
        return credit_on.propagated(leaf_advantages(credit), tree, paths)

    def pruned(
        self, credit: Advantages, rewards: Tensor, weights: Tensor, tree: Branching, iteration: int
    ) -> Tensor | Literal[False]:
        """[P, G, K] edges that are left out, or False: none."""
        return False


class DepthwiseGrpo(TreeGrpoBase[D]):
    """A method that compares the nodes of a step."""

    def credited(
        self, credit: Advantages, rewards: Tensor, weights: Tensor, tree: Branching, paths: Tensor | None
    ) -> Tensor:
        if self.config.advantages.name == "group":
            return self.compared(totals(credit, rewards, weights), tree, paths)
        live = weights != 0
        share = (weights[live] / weights[live].abs().sum()).double()
        parts = [self.compared(torch.where(credit.valid, r, torch.nan), tree, paths) for r in rewards[live]]
        return torch.stack([w * part for w, part in zip(share, parts, strict=True)]).sum(dim=0)

    def compared(self, total: Tensor, tree: Branching, paths: Tensor | None) -> Tensor:
        """Of one reward [P, G]."""
        return credit_on.depthwise(credit_on.fuse(total, tree, paths), total, tree, self.config.scale)


def totals(credit: Advantages, rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rewards, [P, G] float64, NaN where masked."""
    return torch.where(credit.valid, aggregate(rewards, weights), torch.nan)
