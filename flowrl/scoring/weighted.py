"""A reward as a run uses it: its share of the training value, its transform, its gate."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.reward import Reward
from flowrl.scoring.cache import ScoreCache
from flowrl.scoring.options import Gate, Renewal


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward as the configuration uses it; several may hold the same `reward`, each for a value of its own.

    The training value is weight * gate(sum over outputs of share * clip(scale * raw + offset)), with -raw for an output
    of which less is better.
    """

    name: str
    reward: Reward
    weight: float = 1.0
    outputs: dict[str, float] = field(default_factory=dict)
    """Output -> share; empty: the card's first output alone."""
    scale: float | None = None
    offset: float | None = None
    """Where neither is given: the card's transform; else 1 and 0 for the one that is not."""
    clip: tuple[float, float] | None = None
    gate: Gate | None = None
    retries: int | None = None
    """Further tries after an exception; none: the Scorer's. This, `isolate` and `cache` belong to the reward."""
    isolate: bool = True
    """True: a batch that fails in every try is searched for the samples that make it fail."""
    max_failed_share: float | None = None
    """Above this share of samples that this entry could not score the run stops; none: the Scorer's."""
    cache: ScoreCache | None = None
    renew: Renewal | None = None

    def shares(self) -> dict[str, float]:
        return self.outputs or {self.reward.card.outputs[0]: 1.0}

    def transform(self) -> tuple[float, float]:
        """(scale, offset)."""
        if self.scale is None and self.offset is None:
            return self.reward.card.transform
        return 1.0 if self.scale is None else self.scale, 0.0 if self.offset is None else self.offset

    def highest(self) -> float:
        """The highest training value that the card allows; inf: it has no bound."""
        card, open_ = self.reward.card, replace(self, gate=None)
        ends = {output: card.high if card.prefers_more(output) else card.low for output in self.shares()}
        value = float(open_.training_value({output: torch.tensor(end) for output, end in ends.items()}))
        return value if self.gate is None else max(value, self.gate.floor)

    def training_value(self, raw: Mapping[str, Tensor]) -> Tensor:
        """[B] from the raw outputs of all rewards; NaN where a used output is NaN, or the gate's."""
        scale, offset = self.transform()
        total = torch.zeros(())
        for output, share in self.shares().items():
            sign = 1.0 if self.reward.card.prefers_more(output) else -1.0
            value = sign * raw[output] * scale + offset
            if self.clip is not None:
                value = value.clamp(*self.clip)
            total = total + share * value
        return total if self.gate is None else gated(total, self.gate, raw)


def gated(values: Tensor, gate: Gate, raw: Mapping[str, Tensor]) -> Tensor:
    """An entry's values [B] behind its gate; where it is shut they do not matter, and neither does their NaN."""
    score = raw[gate.output]
    open_ = torch.ones_like(score, dtype=torch.bool)
    if gate.at_least is not None:
        open_ = score >= gate.at_least
    if gate.at_most is not None:
        open_ = score <= gate.at_most
    return torch.where(score.isnan(), torch.nan, torch.where(open_, values, gate.floor))
