"""An iteration's data as the rollout leaves it: samples, edges, rewards. Shapes as in `flowrl.core.types`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import Condition, Edges, Identity, Samples
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Rollout:
    """One iteration's data: this rank's samples and edges, everybody's rewards."""

    plan: StepPlan
    samples: Samples
    edges: Edges
    cond: Condition
    rows: Tensor
    """Row of `cond` of each of this rank's samples, [B]."""
    rewards: Tensor
    """Training values of the whole iteration, [R, P, G]."""
    raw: dict[str, Tensor]
    """Raw outputs of the whole iteration, name -> [P, G]."""
    spread: float
    """Mean over prompts of the pixel std inside a group (this rank's), a diversity indicator."""
    maps: Tensor | None = None
    """Where in its picture each of this rank's samples counts, [B, *pos]; only for a method with `spatial`."""
    initial: Tensor | None = None
    """Latents that each of this rank's samples started from, [B, ...] float32; only where their law is learned."""
    laws: Tensor | None = None
    """Number of the law of each prompt of the iteration, [P] int64; only where it is learned."""
    prompts: tuple[Identity, ...] = ()
    """Of all P slots of the iteration."""
    paths: Tensor | None = None
    """Old log-probs of the steps on the way to each sample, [P, G, K], NaN where none is kept; only where credit asks
    for them."""

    @property
    def identity(self) -> Tensor:
        """Number of each of this rank's samples among all P * G of the iteration, [B] int64."""
        size = self.rewards.shape[2]
        return torch.tensor([i.slot * size + i.sample for i in self.samples.ids])
