"""RAM: reinforce adjoint matching: regression to the untouched network, moved by the advantage.

    1. sample x0 with the lagging network `old`
    2. target = v_ref + m A (v* - v_old), without gradient
    3. loss = mean (v - target)^2, at times of density proportional to sigma
    4. after the iteration old <- d old + (1 - d) policy, d = min(0.01 steps, 0.9)

1 / m is the strength of the implied KL to the untouched network: with A = 0 the loss is pure regression to it.

Source: arXiv 2605.10759.
"""

from dataclasses import dataclass, field

from flowrl.algorithms._matching import LagConfig
from flowrl.algorithms._options import CreditOptions, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import matched_target, mean_square

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="power", count=8))
    advantages: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(clip=None))
    strength: float = 100.0
    """m; published: 100 for GenEval and OCR, 1000 for PickScore."""
    old: LagConfig = field(default_factory=lambda: LagConfig(slope=0.01, limit=0.9))
    """Pace of `old`, which draws the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "strength")


class Ram(SampleMethod[Config]):
    behaviour = "old"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared, self.lags = ("reference", "old"), {"old": config.old}

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs = self.outputs(batch, networks)
        roles = outputs.by_role
        target = matched_target(roles["reference"], roles["old"], outputs.target, batch.advantage, self.config.strength)
        loss = mean_square(roles["policy"], target)
        return summed(loss, {"policy/loss": loss} | outputs.metrics())


build = Ram
