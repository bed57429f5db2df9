"""SFT: fine-tuning on the preferred images alone, the plain regression that every preference method must beat.

    1. images (c, x_w) of the data; rejected ones are not opened
    2. x = alpha x0 + sigma eps
    3. loss = mean (v - v*)^2 + kl mean (v - v_ref)^2

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py (`--sft`).
"""

from dataclasses import dataclass

from flowrl.algorithms._matching import PullOptions, pull, pulling
from flowrl.algorithms._options import TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.losses.batches import LossOutput, NoisedBatch, summed

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(PullOptions, TimesOptions):
    """The times, and the pull."""


class Sft(SampleMethod[Config]):
    members = ("chosen",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(reference=config.kl)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs = self.outputs(batch, networks)
        error = outputs.error()
        return summed(error + pull(self.config.kl, outputs, "reference"), {"policy/loss": error} | outputs.metrics())


build = Sft
