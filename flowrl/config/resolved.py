"""A run with its components and their validated options."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowrl.config.components import Component
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core.strict import Options
from flowrl.core.types import Member
from flowrl.scoring.entries import RewardPlan
from flowrl.training.base import Setting, Training
from flowrl.training.kinds import training_of


@dataclass(frozen=True)
class Resolved:
    """A run with its components and their validated options; no model is loaded."""

    run: RunConfig
    model: Component
    sampler: Component
    algorithm: Component
    rewards: tuple[RewardPlan, ...]
    eval_rewards: tuple[RewardPlan, ...]
    anchor: Component | None = None
    """The method by which the network is fitted to the images of `data.anchor`."""

    @cached_property
    def method(self) -> Any:
        """An instance of the method, for its properties; a training builds another one, which has state."""
        return self.algorithm.build()

    @cached_property
    def training(self) -> Training:
        """The method's kind of training data."""
        return training_of(self.method)

    @cached_property
    def fitting(self) -> Training | None:
        """The kind of training data of `anchor`."""
        return None if self.anchor is None else training_of(self.anchor.build())

    @property
    def setting(self) -> Setting:
        """The options on which the training data depend."""
        run = self.run
        return Setting(
            name=self.algorithm.name,
            model=self.model.config,
            sampler=self.sampler.build(),
            rollout=run.rollout,
            optim=run.optim,
            slots=self.slots,
            group_size=self.group_size,
            seed=run.seed,
        )

    @property
    def members(self) -> tuple[Member, ...]:
        """Origin of each sample of a slot; empty: the rollout draws all of them."""
        return self.method.members

    @property
    def slots(self) -> int:
        """Number of prompts, or pairs, of an iteration."""
        pairs = self.run.data.pairs
        return self.run.rollout.prompts_per_iteration if pairs is None else pairs.per_iteration

    @property
    def group_size(self) -> int:
        """Number of samples of a prompt."""
        return len(self.members) or self.run.rollout.group_size

    @property
    def drawn(self) -> int:
        """Number of samples of a prompt that the rollout draws."""
        return self.members.count("drawn") if self.members else self.run.rollout.group_size

    def tree(self) -> Options:
        """Plain data of the configuration with all defaults of its components."""
        tree = to_tree(self.run)
        for place, part in (("model", self.model), ("algorithm", self.algorithm)):
            tree[place] = part.reference | to_tree(part.config)
        if self.anchor is not None:
            tree["data"]["anchor"]["times"] = to_tree(self.anchor.config)["times"]
        if self.training.takes_sampler:
            tree["rollout"]["sampler"] = self.sampler.reference | to_tree(self.sampler.config)
        return tree
