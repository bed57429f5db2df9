"""A run with its components found and their options validated."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.components import Component
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core.strict import Options
from flowrl.core.types import Member
from flowrl.scoring.entries import RewardPlan


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run with every component found and its options validated; nothing is loaded yet."""

    run: RunConfig
    model: Component
    sampler: Component
    algorithm: Component
    rewards: tuple[RewardPlan, ...]
    eval_rewards: tuple[RewardPlan, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Where each sample of a slot comes from; empty: the rollout draws all of them."""
        return self.algorithm.build().members

    @property
    def slots(self) -> int:
        """Prompts of an iteration."""
        pairs = self.run.data.pairs
        return self.run.rollout.prompts_per_iteration if pairs is None else pairs.per_iteration

    @property
    def group_size(self) -> int:
        """Samples of a prompt."""
        return len(self.members) or self.run.rollout.group_size

    @property
    def drawn(self) -> int:
        """Those of them that the rollout draws."""
        return self.members.count("drawn") if self.members else self.run.rollout.group_size

    def tree(self) -> Options:
        """The configuration with every component's defaults written out."""
        tree = to_tree(self.run)
        for place, part in (("model", self.model), ("algorithm", self.algorithm)):
            tree[place] = part.reference | to_tree(part.config)
        if self.algorithm.build().needs == "edges":
            tree["rollout"]["sampler"] = self.sampler.reference | to_tree(self.sampler.config)
        return tree
