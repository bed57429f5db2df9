"""Diffusion-DPO: given pairs of pictures, the error on the preferred one falls against that on the other.

    1. pairs (c, x_w, x_l) of the data; no rollout, no reward
    2. one sigma and one eps for both: x = alpha x0 + sigma eps
    3. Delta = (l_w - l_ref_w) - (l_l - l_ref_l), l = mean (v - v*)^2, the reference without CFG
    4. loss = -log sigmoid(-beta / 2 Delta)

On a model that predicts noise l is the error of eps, on a flow that of the velocity.

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py; flow form: arXiv 2501.13918.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms._matching import NoisedBase, NoisedConfig
from flowrl.algorithms._preference import Space, agreement, given_signs, pair_loss, require_positive
from flowrl.algorithms.base import Networks
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.losses.batches import LossOutput, NoisedBatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(NoisedConfig):
    beta: float | None = None
    """Inverse temperature of the margin; null: 5000 on noise-prediction models, 2000 on flows. The larger, the smaller
    the learning rate must be."""
    space: Space = "output"
    """Errors of what the network predicts, or of the noise that this implies: on a flow beta times (1 - sigma)^2."""

    def __post_init__(self) -> None:
        NoisedConfig.__post_init__(self)
        if self.beta is not None:
            require_positive(beta=self.beta)


class DiffusionDpo(NoisedBase[Config]):
    level = LEVEL
    members = ("chosen", "rejected")
    prefers = True
    unit = "group"
    shared_times = "group"
    shared_eps = True

    def __init__(self, config: Config) -> None:
        NoisedBase.__init__(self, config)
        self.roles = ("reference",)

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return given_signs(rewards)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs, config = self.outputs(batch, networks), self.config
        loss, metrics = pair_loss(outputs, "reference", config.beta, config.space)
        return self.finished(loss, outputs, metrics)

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return agreement(self.outputs(batch, networks), "reference", self.config.space)


def build(config: Config) -> DiffusionDpo:
    return DiffusionDpo(config)
