"""TempFlow-GRPO: children leave one ODE way at each of its steps, so a reward speaks for a single stochastic step.

    1. one ODE way for a tree; at every step i but the last, k children leave it by the SDE and go on by the ODE
    2. A(i, j) = (r(i, j) - mean) / (std + 1e-4) over the children of step i, of all trees of the prompt
    3. loss = w_i max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef KL, w_i = std_i over its mean (`noise_weight`):
       noisy steps move the picture more

A tree has k times as many leaves as steps that branch, and costs (T - 1) + k T (T - 1) / 2 evaluations where all do.

Source: arXiv 2508.04324; Shredded-Pork/TempFlow-GRPO.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from flowrl import tree as credit_on
from flowrl.algorithms._grpo import KLConfig, clipped_terms, merged, with_reference
from flowrl.algorithms._tree import DepthwiseConfig, DepthwiseGrpo
from flowrl.algorithms.base import Networks
from flowrl.branching import Branching, offshoots
from flowrl.plan import subset
from flowrl.tree import Scale
from flowrl.types import LossOutput, Microbatch

LEVEL = "experimental"
_RELEASED = 2.25
"""Factor on the std of a step in the released code for SD3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffshootConfig(DepthwiseConfig):
    """Where children leave the deterministic way."""

    STRIDES: ClassVar[tuple[int, ...]] = (1,)

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

    def every_step(self, num_steps: int) -> list[int]:
        """Those that may branch."""
        return list(range(num_steps - self.merge)) if self.steps is None else self.steps

    def strides_of_children(self) -> tuple[int, ...]:
        """Ways to the end that each child takes."""
        return self.STRIDES

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(OffshootConfig):
    noise_weight: Literal["normalised", "released", "none"] = "normalised"
    """w_i: std_i over its mean over the trained steps; 2.25 std_i; or 1."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))
    kl: KLConfig = field(default_factory=lambda: KLConfig(divisor="variance"))


class TempFlowGrpo(DepthwiseGrpo[Config]):
    level = LEVEL

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        weight = self.weight(policy.std, batch, networks)
        terms = clipped_terms(self.log_ratio(policy, batch, sampler), merged(batch), self.config.clip(sampler), weight)
        return with_reference(terms, policy, batch, networks, self.config.kl)

    def weight(self, std: Tensor, batch: Microbatch, networks: Networks) -> Tensor | None:
        """Of each edge [E], from the std [E] of its step."""
        if self.config.noise_weight == "none":
            return None
        if self.config.noise_weight == "released":
            return _RELEASED * std
        every = credit_on.trained_std(batch.plan, networks.policy.sampler, networks.policy.adapter.process)
        return std / every.mean().to(std)


def build(config: Config) -> TempFlowGrpo:
    return TempFlowGrpo(config)
