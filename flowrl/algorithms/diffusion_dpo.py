"""Diffusion-DPO: given pairs of images, the error on the preferred one falls against that on the other.

    1. pairs (c, x_w, x_l) of the data; no rollout, no reward
    2. one sigma and one eps for both, or the initial noise of each: x = alpha x0 + sigma eps
    3. Delta = (l_w - l_ref_w) - (l_l - l_ref_l), l = mean (v - v*)^2, the reference without CFG
    4. loss = -log sigmoid(-beta / 2 Delta) + kl mean (v - v_ref)^2

On a model that predicts noise l is the error of eps, on a flow that of the velocity. A sample's sign (+1 preferred, -1
not) travels as its advantage.

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py; flow form: arXiv 2501.13918; `own`: 2605.09433.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flowrl.algorithms._matching import NormOptions, PullOptions
from flowrl.algorithms._options import TimesOptions
from flowrl.algorithms._pairs import SIZE, PairOptions, PreferenceOptions, agreement, pair_loss, require_anchor
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.models.weights.roles import Weights

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(NormOptions, PairOptions, PreferenceOptions, PullOptions, TimesOptions):
    """The times, and what every method on pairs has."""

    noise: Literal["fresh", "own"] = "fresh"
    """`own`: each image of `flowrl pairs` is noised along the initial noise that it was drawn from (PNAPO), for flows
    whose pairs a solver without noise has drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_anchor(self.loss, self.kl, self.beta)


class DiffusionDpo(SampleMethod[Config]):
    members = ("chosen", "rejected")
    prefers = True
    unit = "group"
    shared_times = "group"
    eps = "group"
    compared = ("reference",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.graded = config.margin is not None
        if config.noise == "own":
            self.eps = "own"
        self.size = 0.0
        """Running mean of |Delta|."""
        if config.auto_beta is not None:
            self.remembers, self.feedback = ("size",), (SIZE,)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        loss = pair_loss(config, config.kl, outputs, "reference", preference=config, size=self.size)
        return config.guarded(loss, outputs)

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        self.size = self.config.size_after(self.size, means)

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return agreement(self, batch, networks)


build = DiffusionDpo
