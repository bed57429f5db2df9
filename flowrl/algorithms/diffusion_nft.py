"""DiffusionNFT: reinforcement on the forward process, with an implicit positive and an implicit negative policy.

    1. sample x0 with the lagging network `old` by any solver, no CFG
    2. r = clip(A / (2 A_max) + 1/2, 0, 1), the probability that a sample is a good one
    3. v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v; their clean predictions x+, x-
    4. loss = A_max / beta (r L+ + (1 - r) L-) + kl mean (v - v_ref)^2, L = mean (x+- - x0)^2 / w, w = mean |x+- - x0|
    5. after the iteration: old <- d old + (1 - d) policy; d grows with the optimizer steps

At v = v_old the loss does not depend on r, only its gradient does: a flat loss curve is not a fault.
Source: arXiv 2509.16117; NVlabs/DiffusionNFT:scripts/train_nft_sd3.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, LagConfig, NormOptions, pull, pulling
from flowrl.algorithms._options import CreditOptions, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import negative_aware_loss, optimality

LEVEL = "tested"

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

# The released decay types of `old`.
OLD_SCHEDULES = {
    "none": LagConfig(slope=0.0, limit=0.0),
    "ramp": LagConfig(slope=0.001, limit=0.5),
    "late": LagConfig(flat=75, slope=0.0075, limit=0.999),
}


@dataclass(frozen=True, kw_only=True)
class Config(NormOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="permutation", count=None, fraction=0.99))
    mix: float = 1.0
    """beta: distance of the implicit policies from `old`, in units of the policy's own distance."""
    adaptive: bool = True
    """Divide each branch by its mean absolute error; false leaves its time weight plain."""
    mode: AdvantageMode = "all"
    """Advantages that count: all, one sign only, 1 for the positive ones, or the sign alone."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=1e-4))
    """Pull to the untouched network."""
    old: Literal["none", "ramp", "late"] | LagConfig = "ramp"
    """Lag of `old`: none (released type 0), min(0.001 steps, 0.5) (type 1), from step 75 on (type 2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "mix")
        if self.advantages.clip is None:
            raise OptionError(
                "advantages.clip=null: optimality is the advantage within its bound", {"advantages.clip": 5.0}
            )

    @property
    def lag(self) -> LagConfig:
        return OLD_SCHEDULES[self.old] if isinstance(self.old, str) else self.old


class DiffusionNft(SampleMethod[Config]):
    behaviour = "old"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = (*pulling(config.norm_guard, reference=config.kl), "old")
        self.lags = {"old": config.lag}

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        credit = self.rule(rewards, weights, prompts)
        return replace(credit, values=by_mode(credit.values, self.config.mode))

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        bound = config.advantages.clip
        assert bound is not None
        good = optimality(batch.advantage, bound)
        policy, old = outputs.clean("policy"), outputs.clean("old")
        loss = bound * negative_aware_loss(policy, old, batch.clean, good, config.mix, adaptive=config.adaptive)
        metrics = {"policy/loss": loss, "policy/optimality": good}
        total = summed(loss + pull(config.kl, outputs, "reference"), metrics | outputs.metrics())
        return config.guarded(total, outputs)


def by_mode(values: Tensor, mode: AdvantageMode) -> Tensor:
    """The advantages that a mode leaves of `values`, same shape."""
    if mode == "positive_only":
        return values.clamp(min=0)
    if mode == "negative_only":
        return values.clamp(max=0)
    if mode == "one_only":
        return (values > 0).to(values)
    return values.sign() if mode == "binary" else values


build = DiffusionNft
