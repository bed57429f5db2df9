"""Diffusion-DPO: given pairs of images, the error on the preferred one falls against that on the other.

    1. pairs (c, x_w, x_l) of the data; no rollout, no reward
    2. one sigma and one eps for both: x = alpha x0 + sigma eps
    3. Delta = (l_w - l_ref_w) - (l_l - l_ref_l), l = mean (v - v*)^2, the reference without CFG
    4. loss = -log sigmoid(-beta / 2 Delta)

On a model that predicts noise l is the error of eps, on a flow that of the velocity.

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py; flow form: arXiv 2501.13918.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, GivenOptions, pull
from flowrl.algorithms._preference import default_beta, margin, pair_metrics
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.preference import preference_loss
from flowrl.rollout.outputs import Space

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(GivenOptions):
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull to the untouched network."""
    beta: float | None = None
    """Inverse temperature of the margin; null: 5000 on noise-prediction models, 2000 on flows. The larger, the smaller
    the learning rate must be."""
    space: Space = "output"
    """Errors of what the network predicts, or of the noise that this implies: on a flow beta times (1 - sigma)^2."""

    def __post_init__(self) -> None:
        GivenOptions.__post_init__(self)
        if self.beta is not None:
            require_positive(beta=self.beta)


class DiffusionDpo(SampleMethod[Config]):
    members = ("chosen", "rejected")
    prefers = True
    unit = "group"
    shared_times = "group"
    shared_eps = True
    compared = ("reference",)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        delta = margin(outputs, "reference", config.space)
        policy = preference_loss(delta, config.beta or default_beta(outputs.adapter.process))
        metrics = {"policy/loss": policy} | pair_metrics(outputs, delta, config.space) | outputs.metrics()
        return summed(policy + pull(config.kl, outputs, "reference"), metrics)

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return -margin(self.outputs(batch, networks), "reference", self.config.space).detach()


build = DiffusionDpo
