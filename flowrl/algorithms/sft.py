"""SFT: fine-tuning on the preferred pictures alone, the plain regression that every preference method must beat.

    1. pictures (c, x_w) of the data; rejected ones are not opened
    2. x = alpha x0 + sigma eps
    3. loss = mean (v - v*)^2 + kl mean (v - v_ref)^2

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py (`--sft`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms._matching import NoisedBase, NoisedConfig
from flowrl.algorithms._preference import given_signs
from flowrl.algorithms.base import Networks
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.losses.batches import LossOutput, NoisedBatch

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(NoisedConfig):
    """Those of its family alone."""


class Sft(NoisedBase[Config]):
    level = LEVEL
    members = ("chosen",)

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return given_signs(rewards)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs = self.outputs(batch, networks)
        return self.finished(outputs.error(), outputs)


def build(config: Config) -> Sft:
    return Sft(config)
