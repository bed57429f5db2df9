"""Diffusion-DPO: given pairs of images, the error on the preferred one falls against that on the other.

    1. pairs (c, x_w, x_l) of the data; no rollout, no reward
    2. one sigma and one eps for both: x = alpha x0 + sigma eps
    3. Delta = (l_w - l_ref_w) - (l_l - l_ref_l), l = mean (v - v*)^2, the reference without CFG
    4. loss = -log sigmoid(-beta / 2 Delta)

On a model that predicts noise l is the error of eps, on a flow that of the velocity.

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py; flow form: arXiv 2501.13918.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowrl.algorithms._matching import PullOptions
from flowrl.algorithms._options import TimesOptions
from flowrl.algorithms._preference import PairOptions, agreement, pair_loss
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.losses.batches import LossOutput, NoisedBatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, PullOptions, TimesOptions):
    """The times, and what every method on pairs has."""


class DiffusionDpo(SampleMethod[Config]):
    members = ("chosen", "rejected")
    prefers = True
    unit = "group"
    shared_times = "group"
    shared_eps = True
    compared = ("reference",)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        return pair_loss(self.config, self.config.kl, self.outputs(batch, networks), "reference")

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return agreement(self, batch, networks)


build = DiffusionDpo
