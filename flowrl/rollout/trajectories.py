"""An iteration's data as the rollout leaves it: samples, edges, rewards. Shapes as in `flowrl.core.types`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Condition, Edges, Identity, SampleId, Samples
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Asked:
    """B samples to draw."""

    ids: Sequence[SampleId]
    """B identities; they key the noise. A tree's leaves lie together, all of them."""
    cond: Condition
    """Conditions of the prompts."""
    rows: Tensor
    """Row of `cond` of each sample, [B] int64."""

    def __getitem__(self, part: slice) -> Asked:
        """Some of them, with all conditions."""
        return Asked(self.ids[part], self.cond, self.rows[part])


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Samples of this rank with their trained edges, and what they were drawn by."""

    plan: StepPlan
    samples: Samples
    """B samples."""
    edges: Edges
    cond: Condition
    """Conditions of the prompts."""
    rows: Tensor
    """Row of `cond` of each sample, [B] int64."""

    def scored(self, rewards: Tensor, **further: Any) -> Rollout:
        """The rollout with the rewards of the whole iteration [R, P, G]; `further` are fields of `Rollout`."""
        return Rollout(self.plan, self.samples, self.edges, self.cond, self.rows, rewards, **further)


@dataclass(frozen=True, slots=True)
class NoiseDraws:
    """What samples started from, where the distribution of their initial noise is learned."""

    initial: Tensor
    """Latents that each of this rank's samples started from, [B, ...] float32."""
    numbers: Tensor
    """Number of the noise distribution of each prompt of the iteration, [P] int64."""


@dataclass(frozen=True, slots=True)
class Rollout(Trajectories):
    """One iteration's data: this rank's samples and edges, everybody's rewards."""

    rewards: Tensor
    """Training values of the whole iteration, [R, P, G]."""
    raw: dict[str, Tensor] = field(default_factory=dict)
    """Raw outputs of the whole iteration, name -> [P, G]."""
    prompts: tuple[Identity, ...] = ()
    """Identities of all P slots of the iteration."""
    image_std: float = math.nan
    """Mean over prompts of the pixel std inside a group (this rank's), a diversity indicator; NaN: not measured."""
    maps: Tensor | None = None
    """Where in its picture each of this rank's samples counts, [B, *pos]; only for a method with `spatial`."""
    noise: NoiseDraws | None = None
    """Only where the distribution of the initial noise is learned."""
    paths: Tensor | None = None
    """Old log-probs of the steps on the way to each sample, [P, G, K], NaN where none is kept; only where credit asks
    for them."""

    def leaf_rewards(self, weights: Tensor) -> LeafRewards:
        """The rewards with their weights [R], as credit by edge takes them; only where the plan has a tree."""
        assert self.plan.tree is not None
        return LeafRewards(self.plan.tree, self.rewards, weights, self.paths)

    @property
    def identity(self) -> Tensor:
        """Number of each of this rank's samples among all P * G of the iteration, [B] int64."""
        size = self.rewards.shape[2]
        return torch.tensor([i.slot * size + i.sample for i in self.samples.ids])
