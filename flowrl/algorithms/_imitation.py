"""What RWR and RAFT share: they imitate samples in proportion to weights that are never negative.

Without a negative side, a network that learns from its own samples copies their discretisation error, and the next
samples err twice: contrast and reward fall within tens of iterations, whatever is rewarded. So the samples come from a
network that stays behind (`refresh`), as in yifan123/flow_grpo:scripts/train_sd3_sft.py (`ref_update_step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flowrl.algorithms._matching import MatchingBase, MatchingConfig
from flowrl.algorithms.base import Networks
from flowrl.credit.advantages import AdvantageConfig, Advantages
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.models.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ImitationConfig(MatchingConfig):
    refresh: int | None = 40
    """Optimizer steps after which the samples are drawn by the policy as it then is; until then by the one before.
    0: always by the policy; null: always by the untouched one (offline)."""

    def __post_init__(self) -> None:
        MatchingConfig.__post_init__(self)
        if self.refresh is not None and self.refresh < 0:
            raise ValueError(f"refresh={self.refresh} must not be negative; null never refreshes")
        if self.advantages != AdvantageConfig():
            raise ValueError("advantages: this method weighs raw rewards and takes no advantage rule; leave it out")


C = TypeVar("C", bound=ImitationConfig)


class ImitationBase(MatchingBase[C]):
    """A method whose credit is a weight [P, G] of each sample."""

    def __init__(self, config: C) -> None:
        MatchingBase.__init__(self, config)
        self.refreshes = 0
        if config.refresh != 0:
            self.roles, self.behaviour = (*self.roles, "sampling"), "sampling"

    @property
    def frozen(self) -> int:
        return len(self.roles) - (self.config.refresh != 0)

    def guidance(self, networks: Networks) -> dict[str, float]:
        found = MatchingBase.guidance(self, networks)
        found.pop("sampling", None)  # it draws the samples, and that is all
        return found

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        """w mean (v - v*)^2."""
        outputs, weight = self.outputs(batch, networks), batch.advantage.double()
        metrics = {"policy/weight": weight, "policy/weight_square": weight.square()}
        return self.finished(weight * outputs.error(), outputs, metrics)

    def after_iteration(self, updates: int, weights: Weights) -> None:
        due = updates // self.config.refresh if self.config.refresh else 0
        if due > self.refreshes:
            self.refreshes = due
            weights.follow("sampling", 0.0)

    def state_dict(self) -> dict:
        return {"refreshes": self.refreshes}

    def load_state_dict(self, state: dict) -> None:
        if set(state) != {"refreshes"}:
            raise ValueError(f"the checkpoint has {sorted(state)}, this method keeps how often it has refreshed")
        self.refreshes = state["refreshes"]


def imitation(weights: Tensor, total: Tensor) -> Advantages:
    """Weights [P, G] as the credit of a method that imitates: samples of weight 0 take no part.

    A group of equal rewards is not dead: it is imitated as it is.
    """
    valid = total.isfinite()
    dead = torch.zeros(len(total), dtype=torch.bool)
    return Advantages(values=weights.float()[:, :, None], valid=valid, dead=dead, kept=valid & (weights > 0))
