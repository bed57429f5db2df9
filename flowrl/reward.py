"""Rewards: the contract of one, and the scorer that runs several.

A reward is `score(images, prompts, metadata)`: images float [B, 3, H, W], or videos [B, F, 3, H, W], in
[0, 1] (a list where sizes differ); it returns [B], or {output name: [B]}, on the reward's published scale.
A sample that could not be scored is NaN, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ScoreFunction = Callable[[Any, Sequence[str], Sequence[dict]], "Tensor | Mapping[str, Tensor]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a reward declares about itself."""

    outputs: tuple[str, ...]
    """Names of its values; the first one is trained on unless the configuration says otherwise."""
    low: float = -math.inf
    high: float = math.inf
    """Range of the raw values; a finite value outside it stops the run."""
    higher_is_better: bool = True
    transform: tuple[float, float] = (1.0, 0.0)
    """(scale, offset) of the training value where the entry of the configuration sets none."""
    modality: str = "image"
    """"image", "video" (clips only), "any" (pictures, and clips by their frames), or "edit" (source and result)."""
    resolution: str = "any"
    """What it sees of a picture, in words: "224 x 224, the centre square"."""
    requires: tuple[str, ...] = ()
    """Keys that every sample's metadata must have."""
    memory_gib: float = 0.0
    """What its weights take, about; 0 where it has none."""
    version: str = "1"
    """Of what it computes: raised whenever a score changes. A cache tells versions apart."""
    differentiable: bool = False
    """True where gradients reach the images: no inference mode, cache, PIL or network on the way."""
    needs_groups: bool = False
    """True where a score depends on the other samples of the prompt."""
    overlap: bool = False
    """True where scoring leaves the sampling device alone (a server, a reader on the CPU): finished batches of a
    rollout are then scored in a thread while the next ones are sampled."""
    level: str = "experimental"
    """"tested" (a CPU test scores with it), "verified" (real weights, with numbers), "experimental"."""
    licence: str = "unknown"
    source: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named scorer with its card; what `build(config)` of a file in `rewards/` returns."""

    score: ScoreFunction
    card: Card


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward as the configuration uses it; several may hold the same `reward`, each for a value of its own.

    The training value is weight * sum over outputs of share * clip(scale * raw + offset).
    """

    name: str
    reward: Reward
    weight: float = 1.0
    outputs: dict[str, float] = field(default_factory=dict)
    """Output -> share; empty: the card's first output alone."""
    scale: float = 1.0
    offset: float = 0.0
    clip: tuple[float, float] | None = None

    def shares(self) -> dict[str, float]:
        return self.outputs or {self.reward.card.outputs[0]: 1.0}

    def training_value(self, raw: Mapping[str, Tensor]) -> Tensor:
        """[B] from the raw outputs; NaN where any used output is NaN."""
        sign = 1.0 if self.reward.card.higher_is_better else -1.0
        total = torch.zeros(())
        for output, share in self.shares().items():
            value = sign * raw[output] * self.scale + self.offset
            if self.clip is not None:
                value = value.clamp(*self.clip)
            total = total + share * value
        return total


class RewardError(RuntimeError):
    """A reward broke its contract; the message names the reward and the remedy."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of scoring B samples."""

    raw: dict[str, Tensor]
    """Output name -> [B] float32, raw scale."""
    values: Tensor
    """Training values per reward, [R, B]; NaN marks a sample to be masked."""
    weights: Tensor
    """[R]."""
    failures: int = 0
    """Samples that some reward could not score."""

    @property
    def total(self) -> Tensor:
        """Weighted sum, [B]; NaN where a reward that counts has failed."""
        live = self.weights != 0
        return (self.values[live] * self.weights[live, None]).sum(dim=0)


def score_once(
    entry: WeightedReward, images: Any, prompts: Sequence[str], metadata: Sequence[dict]
) -> dict[str, Tensor]:
    """Raw outputs of one reward, checked against its card.

    Raises:
        RewardError: no numbers, a wrong shape, other outputs than declared, a finite value outside the range.
    """
    card, count = entry.reward.card, len(prompts)
    result = entry.reward.score(images, prompts, metadata)
    named = dict(result) if isinstance(result, Mapping) else {card.outputs[0]: result}
    if set(named) != set(card.outputs):
        raise RewardError(
            f"reward {entry.name!r} declares the outputs {list(card.outputs)} but returned {list(named)}; "
            f"name them all in the Card of its build(config)"
        )
    checked: dict[str, Tensor] = {}
    for name in card.outputs:
        try:
            tensor = torch.as_tensor(named[name], dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(
                f"reward {entry.name!r} returned a {type(named[name]).__name__} for {name!r} that is not one number "
                f"a sample ({error}); a sample that could not be scored is NaN"
            ) from error
        tensor = tensor.detach().cpu()
        if tensor.shape != (count,):
            raise RewardError(
                f"reward {entry.name!r} returned shape {tuple(tensor.shape)} for {name!r}; "
                f"it was given {count} samples and must return one number for each, shape ({count},)"
            )
        finite = tensor[tensor.isfinite()]
        # Ranges are declared with float literals: allow for their rounding.
        slack = 1e-4 * max(1.0, abs(card.high) if math.isfinite(card.high) else 1.0)
        if finite.numel() and (finite.min() < card.low - slack or finite.max() > card.high + slack):
            raise RewardError(
                f"reward {entry.name!r} returned {finite.min():.4g}..{finite.max():.4g} for {name!r}, "
                f"outside its declared range {card.low}..{card.high}"
            )
        checked[name] = torch.where(tensor.isfinite(), tensor, torch.nan)
    return checked


class Scorer:
    """Runs several rewards on a batch: retry, then mask, then abort.

    Entries that hold the same `Reward` object share its one pass over a batch; each makes its own training value.

    Args:
        entries: the rewards with their weights.
        batch_size: samples handed to a reward at once.
        retries: further tries after an exception.
        max_failed_share: above this share of masked samples in one call the run stops.
    """

    def __init__(
        self,
        entries: Sequence[WeightedReward],
        *,
        batch_size: int = 64,
        retries: int = 2,
        max_failed_share: float = 0.5,
        on_error: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not entries:
            raise ValueError("rewards: at least one reward is needed")
        first: dict[int, WeightedReward] = {}
        for entry in entries:
            first.setdefault(id(entry.reward), entry)
        self.distinct = tuple(first.values())
        """The first entry of each reward: what is run."""
        outputs = self.outputs
        doubled = sorted({name for name in outputs if outputs.count(name) > 1})
        if doubled:
            names = " and ".join(repr(e.name) for e in self.distinct if doubled[0] in e.reward.card.outputs)
            raise ValueError(
                f"rewards: the output {doubled[0]!r} is produced by two entries ({names}) that are not one reward with "
                "the same options; make their options equal (weight, outputs, scale, offset and clip may differ), or "
                "drop one"
            )
        for entry in entries:
            unknown = sorted(set(entry.outputs) - set(entry.reward.card.outputs))
            if unknown:
                raise ValueError(
                    f"rewards: {entry.name!r} has no output {unknown[0]!r}; it has {list(entry.reward.card.outputs)}"
                )
        self.entries = tuple(entries)
        self.batch_size, self.retries, self.max_failed_share = batch_size, retries, max_failed_share
        self.on_error = on_error

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for entry in self.distinct for name in entry.reward.card.outputs)

    def score(self, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> Scores:
        """Score B samples in chunks; sample i never depends on its chunk (rewards are row-wise).

        A reward that needs whole groups gets the batch in one piece.

        Raises:
            RewardError: a broken contract, or more than `max_failed_share` of the samples failed.
        """
        count, errors = len(prompts), []
        joined: dict[str, Tensor] = {}
        for entry in self.distinct:
            chunk = max(count, 1) if entry.reward.card.needs_groups else self.batch_size
            parts = [
                self._attempt(entry, images[part], prompts[part], metadata[part], errors)
                for part in (slice(start, start + chunk) for start in range(0, count, chunk))
            ]
            for name in entry.reward.card.outputs:
                joined[name] = torch.cat([part[name] for part in parts]) if parts else torch.empty(0)
        values = torch.stack([entry.training_value(joined) for entry in self.entries])
        weights = torch.tensor([entry.weight for entry in self.entries], dtype=torch.float32)
        # A reward that is only looked at (weight 0) ends nothing by failing.
        counted = values[weights != 0] if bool((weights != 0).any()) else values
        lost = int(counted.isnan().any(dim=0).sum())
        if lost > self.max_failed_share * count:
            raise RewardError(
                f"{lost} of {count} samples could not be scored, more than the allowed share "
                f"{self.max_failed_share}; {errors[-1] if errors else 'the rewards returned NaN for them'}"
            )
        return Scores(raw=joined, values=values, weights=weights, failures=int(values.isnan().any(dim=0).sum()))

    def _attempt(
        self, entry: WeightedReward, images: Any, prompts: Sequence[str], metadata: Sequence[dict], errors: list[str]
    ) -> dict[str, Tensor]:
        """Raw outputs of one chunk, NaN after the last try; every exception is told and appended to `errors`."""
        tries = self.retries + 1
        for attempt in range(1, tries + 1):
            try:
                return score_once(entry, images, prompts, metadata)
            except RewardError:
                raise
            except Exception as error:  # a user's code may raise anything; the policy is retry, then mask
                errors.append(
                    f"reward {entry.name!r} raised {type(error).__name__}: {error} (try {attempt} of {tries})"
                )
                self.on_error(errors[-1])
        return {name: torch.full((len(prompts),), torch.nan) for name in entry.reward.card.outputs}
