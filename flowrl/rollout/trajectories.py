"""The data of an iteration after its rollout: samples, edges, rewards. Shapes as in `flowrl.core.types`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Condition, Edges, Identity, SampleId, Samples
from flowrl.credit.tree_credit import LeafRewards
from flowrl.data.prompts import Prompt, identity
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Asked:
    """B samples to draw."""

    ids: Sequence[SampleId]
    """B identities; they key the noise. A tree's leaves are neighbours, and complete."""
    cond: Condition
    """Conditions of the prompts."""
    rows: Tensor
    """Row of `cond` of each sample, [B] int64."""

    def __getitem__(self, part: slice) -> "Asked":
        """A part of the samples, with all conditions."""
        return Asked(self.ids[part], self.cond, self.rows[part])


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Samples of this process with their trained edges, plan and conditions."""

    plan: StepPlan
    samples: Samples
    """B samples."""
    edges: Edges
    cond: Condition
    """Conditions of the prompts."""
    rows: Tensor
    """Row of `cond` of each sample, [B] int64."""

    def scored(self, rewards: Tensor, **further: Any) -> "Rollout":
        """The rollout with the rewards of the whole iteration [R, P, G]; `further` are fields of `Rollout`."""
        return Rollout(self.plan, self.samples, self.edges, self.cond, self.rows, rewards, **further)


@dataclass(frozen=True, slots=True)
class NoiseDraws:
    """The initial noise of samples, if its distribution is learned."""

    initial: Tensor
    """Initial noise of this process's samples, [B, ...] float32."""
    numbers: Tensor
    """Number of the noise distribution of each prompt of the iteration, [P] int64."""


@dataclass(frozen=True, slots=True)
class Rollout(Trajectories):
    """The data of one iteration: samples and edges of this process, rewards of all."""

    rewards: Tensor
    """Training values of the whole iteration, [R, P, G]."""
    raw: dict[str, Tensor] = field(default_factory=dict)
    """Raw outputs of the whole iteration, name -> [P, G]."""
    prompts: tuple[Prompt, ...] = ()
    """Prompts of all P slots of the iteration, with their metadata."""
    image_std: float = math.nan
    """Mean over this process's prompts of the pixel std inside a group, a measure of diversity; NaN: not measured."""
    maps: Tensor | None = None
    """Saliency maps of this process's samples, [B, *pos]; None: a method without `spatial`."""
    gains: Tensor | None = None
    """What each trained step adds to the value of its latents, [P, G, K], NaN elsewhere; None: a method without
    `step_values`."""
    noise: NoiseDraws | None = None
    """Initial noise, if its distribution is learned."""
    paths: Tensor | None = None
    """Old log-probs of the steps on the way to each sample, [P, G, K], NaN for steps without one; None: credit does not
    need them."""

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Identities of all P slots of the iteration."""
        return tuple(identity(prompt) for prompt in self.prompts)

    def leaf_rewards(self, weights: Tensor) -> LeafRewards:
        """The rewards with their weights [R], as credit by edge takes them; only where the plan has a tree."""
        assert self.plan.tree is not None
        return LeafRewards(self.plan.tree, self.rewards, weights, self.paths)

    @property
    def identity(self) -> Tensor:
        """Number of each of this process's samples among all P * G of the iteration, [B] int64."""
        size = self.rewards.shape[2]
        return torch.tensor([i.slot * size + i.sample for i in self.samples.ids])
