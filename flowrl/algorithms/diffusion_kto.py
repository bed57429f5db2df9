"""Diffusion-KTO: images that were liked or not, without pairs; the gain saturates as human utility does.

    1. images (c, x, y) of the data, y = +1 liked, -1 not, with a fixed share of liked ones
    2. x = alpha x0 + sigma eps; g = l_ref - l, l = mean (v - v*)^2, the reference without CFG
    3. z = max(mean of g over all terms of the update, 0) (a pass of its own, reduced over all processes); or the mean
       of the liked terms' and the disliked terms' means, of either sign
    4. loss = -U(y beta (g - z)): 1 - sigmoid, or risk-averse or risk-seeking

Source: arXiv 2404.04465; jacklishufan/diffusion-kto:train_kto_sd_v1.5.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._matching import PullOptions, pull
from flowrl.algorithms._options import TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.preference import Offset, Utility, label_loss, reference_point
from flowrl.rollout.outputs import Outputs, Space

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(PullOptions, TimesOptions):
    beta: float = 1000.0
    """Scale of the gain."""
    utility: Utility = "kahneman_tversky"
    """Shape of the loss; see `flowrl/losses/preference.py`."""
    offset: Offset = "mean"
    """z: the mean of g over all terms, at least 0; or the mean of the two classes' means, of either sign."""
    liked_share: float = 0.8
    """Share of liked images among those that are drawn."""
    mixed: Literal["positive", "negative", "drop"] = "positive"
    """Label of an image that won one pair and lost another."""
    space: Space = "output"
    """Errors of what the network predicts, or of the noise that this implies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "beta")
        if not 0 < self.liked_share < 1:
            raise ValueError(f"liked_share={self.liked_share} must be in (0, 1): both classes are drawn")


class DiffusionKto(SampleMethod[Config]):
    members = ("labelled",)
    prefers = True
    centres = True
    compared = ("reference",)

    def gain(self, outputs: Outputs) -> Tensor:
        """g of each term, [M] float64."""
        return outputs.error("reference", self.config.space) - outputs.error("policy", self.config.space)

    def measured(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """g, and g and the count of each class: [M, 5] float64."""
        gain, liked = self.gain(self.outputs(batch, networks)), (batch.advantage > 0).double()
        return torch.stack([gain, liked * gain, liked, (1 - liked) * gain, 1 - liked], dim=1)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        assert batch.centre is not None
        gain, offset = self.gain(outputs), reference_point(batch.centre, config.offset)
        policy = label_loss(gain, batch.advantage, offset, config.beta, config.utility)
        metrics = {
            "policy/loss": policy,
            "policy/implicit_accuracy": (batch.advantage * gain > 0).to(gain),
            "policy/gain": gain,
            "policy/offset": offset.expand_as(gain),
        }
        return summed(policy + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return (batch.advantage * self.gain(self.outputs(batch, networks))).detach()


build = DiffusionKto
