"""Whether a score is its sample's own: the same alone as in a batch, and the same when it is asked for twice."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.reward import Card

AGAIN = 1e-6
"""Largest difference of scores of one batch in two calls. This and the next two are relative to the larger of 1 and the
score's size; see `difference` for scores that are all small."""
ALONE = 1e-4
"""The same of a sample in two batches: float32 sums in another order."""
ALONE_IN_HALF = 5e-2
"""The same of a network in half precision, whose rounding follows the shape of the batch."""
_SMALL = 1e-3
"""Below this largest score of a batch the scores themselves are the scale of a difference; down to 1e-6, where `ALONE`
is at the rounding of float32 numbers around 1 (1e-7)."""
BY_ITSELF = (
    "score each sample by itself: no mean, maximum or padding over the batch (or declare it in the file: CARD = "
    "flowrl.Card(..., needs_groups=True) for a score among the samples of a prompt, half_precision=True for a network "
    "in half precision or TF32)"
)
REPEATABLE = (
    "seed what is random from the sample itself, and put the network in eval() (or declare it in the file, as for a "
    "judge whose answers vary: CARD = flowrl.Card(..., repeatable=False))"
)


def alone_tolerance(card: Card) -> float:
    """Largest `difference` of a sample's scores in two batches."""
    return ALONE_IN_HALF if card.half_precision else ALONE


@dataclass(frozen=True, slots=True)
class Apart:
    """The sample whose scores differ most."""

    output: str
    row: int
    first: float
    second: float
    by: float
    """Relative difference; infinite where one is NaN and the other is not."""


def most_apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Apart:
    """The largest difference between scores [B] of equal samples, relative to the larger of 1 and the first's size.

    Where no score of an output reaches 1e-3 in size, 1000 times the largest stands for the 1: a difference is at most
    a tenth of the largest score under `ALONE`, so a reward of a small scale is tried too.

    >>> most_apart({"a": torch.tensor([0.0, 4.0])}, {"a": torch.tensor([0.5, 5.0])}).by
    0.5
    """
    worst = Apart("", 0, 0.0, 0.0, 0.0)
    for name, own in first.items():
        a, b = own.double(), second[name].double()
        largest = float(torch.cat([a, b]).nan_to_num(0.0).abs().max()) if len(a) else 0.0
        unit = min(max(largest / _SMALL, _SMALL), 1.0)
        by = torch.where(a.isnan() & b.isnan(), 0.0, ((a - b).abs() / a.abs().clamp(min=unit)).nan_to_num(torch.inf))
        for row, value in enumerate(by.tolist()):
            if value > worst.by:
                worst = Apart(name, row, float(a[row]), float(b[row]), value)
    return worst


def could_be_rounding(apart: Apart) -> bool:
    """Whether a difference is that of half precision or TF32: within `ALONE_IN_HALF` of the score's own size.

    Not of 1: scores around 0 that are taken over a batch differ by as much as they are.

    >>> could_be_rounding(Apart("a", 0, 20.0, 20.02, 1e-3)), could_be_rounding(Apart("a", 0, 0.02, 0.0, 0.02))
    (True, False)
    """
    return abs(apart.first - apart.second) <= ALONE_IN_HALF * max(abs(apart.first), abs(apart.second))


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """`most_apart` as a number."""
    return most_apart(first, second).by


def rows(scores: Mapping[str, Tensor], chosen: list[int]) -> dict[str, Tensor]:
    """Scores of some samples."""
    return {name: values[chosen] for name, values in scores.items()}
