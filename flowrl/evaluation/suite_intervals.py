"""Parts of a suite's lines: values by prompt, and their mean with an interval."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.statistics.intervals import FEW, LEVELS, Bounds, Clusters, of_few, student
from flowrl.statistics.intervals import stratified as over_strata

_DRAWS, _AT_ONCE = 10_000, 500


@dataclass(frozen=True, slots=True)
class Part:
    """A stratum of a line: prompts that are drawn with each other when an interval is made."""

    values: dict[str, tuple[float, ...]]
    """Prompt -> values of its images (or test points), NaN where there is none; they are not independent."""
    weight: float = 1.0
    name: str = ""
    """What tells it from other parts of a line where which ones it has depends on the results; "": its place does."""

    def totals(self) -> Iterator[tuple[str, float, int]]:
        """(prompt, sum, number) of the values of each prompt that has any."""
        for prompt, values in self.values.items():
            valid = [value for value in values if not math.isnan(value)]
            if valid:
                yield prompt, math.fsum(valid), len(valid)

    @property
    def clusters(self) -> Clusters:
        """Sum and number of the values of each prompt that has any."""
        totals = list(self.totals())
        return Clusters(np.asarray([t for _, t, _ in totals], dtype=np.float64), np.asarray([n for _, _, n in totals]))


def stratified(parts: Sequence[Part], bounds: Bounds | None = None) -> tuple[float, float, float]:
    """(mean, low, high) of the weighted mean of the parts' means, with a 95 % interval over prompts in each part.

    A part without a value makes all three NaN: the mean of the others is another number. A part of one prompt says
    nothing of its spread, and leaves no interval. `bounds`: least and largest possible value; None: not known.

    >>> stratified([Part({"a": (0.0, 1.0), "b": (0.5,)})])[0]
    0.5
    """
    samples = [part.clusters for part in parts]
    if not samples or not all(map(len, samples)):
        return math.nan, math.nan, math.nan
    if len(samples) == 1 and samples[0].few:
        mean = samples[0].mean
        return (mean, *of_few(samples[0], mean, 0, bounds))
    result = over_strata(samples, [part.weight for part in parts], 0)
    mean, low, high = result["mean"], result["low"], result["high"]
    if min(map(len, samples)) < 2:
        return mean, math.nan, math.nan
    return (mean, low, high) if bounds is None else (mean, max(low, bounds[0]), min(high, bounds[1]))


def together(parts: Sequence[Part], bounds: Bounds | None = None, seed: int = 0) -> tuple[float, float, float]:
    """`stratified` of parts that share their prompts: a prompt is drawn with its values in all of them.

    Below 50 prompts the interval is the t interval of the prompts' influences; a part of one prompt leaves none.
    """
    weights = np.asarray([part.weight for part in parts], dtype=np.float64)
    prompts = list(dict.fromkeys(prompt for part in parts for prompt in part.values))
    sums, counts = (np.zeros((len(prompts), len(parts))) for _ in range(2))
    place = {prompt: number for number, prompt in enumerate(prompts)}
    for column, part in enumerate(parts):
        for prompt, total, number in part.totals():
            sums[place[prompt], column], counts[place[prompt], column] = total, number
    known = (counts > 0).sum(axis=0)
    if not len(parts) or not known.all():
        return math.nan, math.nan, math.nan
    means = sums.sum(axis=0) / counts.sum(axis=0)
    mean = math.fsum(weights / weights.sum() * means)
    if (known < 2).any():
        return mean, math.nan, math.nan
    if len(prompts) < FEW:
        influence = ((sums - means * counts) / counts.mean(axis=0) * weights).sum(axis=1) / weights.sum()
        error = float(np.sqrt((influence**2).sum() / len(prompts) / (len(prompts) - 1)))
        reach = student(len(prompts) - 1) * error
        low, high = mean - reach, mean + reach
    else:
        low, high = _drawn(sums, counts, weights, seed)
    return (mean, low, high) if bounds is None else (mean, max(low, bounds[0]), min(high, bounds[1]))


def _drawn(sums: np.ndarray, counts: np.ndarray, weights: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of the weighted mean over columns of sum / count, [P, kinds] each, over prompts."""
    rng, means = np.random.default_rng(seed), np.empty(_DRAWS)
    chances = np.full(len(sums), 1 / len(sums))
    for start in range(0, _DRAWS, _AT_ONCE):
        drawn = rng.multinomial(len(sums), chances, size=_AT_ONCE).astype(np.float64)
        total, number = drawn @ sums, drawn @ counts
        # A kind that was not drawn has no mean; the draw is that of the others.
        ratios = np.divide(total, number, out=np.zeros_like(total), where=number > 0) * weights
        there = ((number > 0) * weights).sum(axis=1)
        means[start : start + _AT_ONCE] = np.divide(
            ratios.sum(axis=1), there, out=np.full(_AT_ONCE, np.nan), where=there > 0
        )
    low, high = np.nanpercentile(means, [100 * level for level in LEVELS])
    return float(low), float(high)
