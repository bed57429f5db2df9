"""Intervals of a mean over prompts. P prompts, N groups of prompts that are not independent, S seeds.

The unit that is drawn is the group: a prompt with all its images and duplicates. From `FEW` groups on, `FEW_DIFFER` of
them unlike the commonest value, the interval is the percentile bootstrap. Below, where that is too narrow, it is the
wider of two at each end: the t interval, which holds for symmetric values, and the bootstrap-t (Efron and Tibshirani
1993, section 12.5), which follows a skewed distribution. Ties, groups of the same value, take degrees of freedom from
the t interval (`_freedom`). docs/judging/statistics.md has the measured coverage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP = 10_000
"""Resamples of an interval."""
FEW = 50
"""Groups from which the percentile bootstrap is taken."""
FEW_DIFFER = 30
"""Groups unlike the commonest value from which it is."""
LEVELS = (0.025, 0.975)
NORMAL = 1.959963984540054
"""The normal quantile of the upper level."""
_CHUNK = 1000
_GAUSSIAN = 3.0
"""Kurtosis of a normal distribution."""
_FLOOR = 1 / 3
"""Least standard error of a resample, as a share of the sample's own: ties alone have none, and t would be endless."""

Bounds = tuple[float, float]
"""Least and largest value that a mean can have."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """N groups of values that are not independent of each other; every group has at least one."""

    total: np.ndarray
    """Sum of the values of each group, [N] float64."""
    count: np.ndarray
    """Number of values of each group, [N], at least 1."""

    def __len__(self) -> int:
        return len(self.count)

    @property
    def mean(self) -> float:
        """Mean over all values; NaN without any."""
        return float(self.total.sum() / self.count.sum()) if len(self) else math.nan

    @property
    def excess(self) -> np.ndarray:
        """Sum of each group's distances from the commonest group mean, [N]; 0 for a tie.

        Of values that are equally common it is the one nearest the mean. Without two equal groups it is `mean`.
        """
        each = self.total / self.count
        width = float(np.ptp(each)) if len(self) else 0.0
        if width == 0.0:
            return np.zeros(len(self))
        # Equal but for the rounding of their sums.
        same = np.round((each - each.min()) / width, 9)
        first, place, often = np.unique(same, return_index=True, return_inverse=True, return_counts=True)[1:]
        if often.max() == 1:
            return self.total - self.mean * self.count
        centres = each[first]
        ranks = np.lexsort((np.abs(centres - self.mean), -often))
        distance = np.where(place == ranks[0], 0.0, each - centres[ranks[0]])
        return distance * self.count

    @property
    def differing(self) -> int:
        """Groups that differ from the commonest value; all of them where no two are equal."""
        return int(np.count_nonzero(self.excess))

    @property
    def few(self) -> bool:
        """Whether they are too few for a percentile bootstrap: `of_few` then has the interval."""
        return len(self) < FEW or self.differing < FEW_DIFFER

    @property
    def error(self) -> float:
        """Standard error of `mean`, linear in the groups; NaN below two of them."""
        n = len(self)
        if n < 2:
            return math.nan
        residual = self.total - self.mean * self.count
        return math.sqrt(float((residual**2).sum()) * n / (n - 1)) / float(self.count.sum())


def clusters(values: np.ndarray, groups: np.ndarray | None = None) -> Clusters:
    """The groups of [P] values without NaN; `groups` [P] int64 numbers them, None: each value is its own."""
    valid = ~np.isnan(values)
    place = np.arange(valid.sum()) if groups is None else np.unique(groups[valid], return_inverse=True)[1]
    return Clusters(np.bincount(place, values[valid]), np.bincount(place))


def interval(
    per_prompt: np.ndarray, groups: np.ndarray | None = None, seed: int = 0, bounds: Bounds | None = None
) -> dict[str, float]:
    """Mean and 95 % interval over prompts of [P] values; n prompts are not NaN and count.

    Args:
        per_prompt: a value for each prompt, NaN where there is none.
        groups: [P] int64, equal for prompts that are the same; whole groups are drawn. None: all differ.
        seed: of the bootstrap.
        bounds: least and largest possible value, at which an interval of few prompts ends; None: not known.

    Returns:
        `mean`, `low`, `high`, `n`. One group alone, and equal values without `bounds`, have no interval: `low` and
        `high` are NaN.

    >>> interval(np.asarray([0.5, 0.5]))
    {'mean': 0.5, 'low': nan, 'high': nan, 'n': 2}
    """
    values = per_prompt[~np.isnan(per_prompt)]
    if not len(values):
        return {"mean": math.nan, "low": math.nan, "high": math.nan, "n": 0}
    mean, sample = float(values.mean()), clusters(per_prompt, groups)
    if sample.few:
        low, high = of_few(sample, mean, seed, bounds)
        return {"mean": mean, "low": low, "high": high, "n": len(values)}
    count, total, means = sample.count, sample.total, []
    for rows in resamples(len(sample), seed):
        # Where every group has one value the sums of counts are known.
        drawn = len(count) if (count == 1).all() else count[rows].sum(axis=1)
        means.append(total[rows].sum(axis=1) / drawn)
    low, high = np.percentile(np.concatenate(means), [100 * level for level in LEVELS])
    return {"mean": mean, "low": float(low), "high": float(high), "n": len(values)}


def intervals(
    columns: np.ndarray, groups: np.ndarray | None = None, seed: int = 0, bounds: Bounds | None = None
) -> list[dict[str, float]]:
    """`interval` of each of M columns [M, P] with common draws: equal but for rounding, and many times faster."""
    columns = np.asarray(columns, dtype=np.float64)
    patterns: dict[bytes, list[int]] = {}
    for number, column in enumerate(columns):
        patterns.setdefault(np.isnan(column).tobytes(), []).append(number)
    result: list[dict[str, float]] = [{} for _ in columns]
    for members in patterns.values():
        samples = {m: clusters(columns[m], groups) for m in members}
        alone = members if len(members) == 1 else [m for m in members if samples[m].few]
        for m in alone:
            result[m] = interval(columns[m], groups, seed, bounds)
        together = [m for m in members if m not in alone]
        if not together:
            continue
        count, totals = (
            samples[together[0]].count.astype(np.float64),
            np.stack([samples[m].total for m in together], axis=1),
        )
        drawn = [weights @ np.column_stack([totals, count]) for weights in weights_of(len(count), seed)]
        table = np.concatenate(drawn)
        ends = np.percentile(table[:, :-1] / table[:, -1:], [100 * level for level in LEVELS], axis=0)
        for k, m in enumerate(together):
            values = columns[m][~np.isnan(columns[m])]
            low, high = map(float, ends[:, k])
            result[m] = {"mean": float(values.mean()), "low": low, "high": high, "n": len(values)}
    return result


def resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    """`BOOTSTRAP` draws of `count` numbers out of `count` with replacement, as chunks [R, count] int64."""
    rng = np.random.default_rng(seed)
    for start in range(0, BOOTSTRAP, _CHUNK):
        yield rng.integers(count, size=(min(_CHUNK, BOOTSTRAP - start), count))


def weights_of(count: int, seed: int) -> Iterator[np.ndarray]:
    """How often each of `count` numbers is in the draws of `resamples`, as chunks [R, count] float64."""
    for rows in resamples(count, seed):
        places = rows + count * np.arange(len(rows))[:, None]
        yield np.bincount(places.ravel(), minlength=rows.size).reshape(rows.shape).astype(np.float64)


def of_few(sample: Clusters, mean: float, seed: int, bounds: Bounds | None) -> tuple[float, float]:
    """(low, high) of the mean of a few groups (`Clusters.few`); `interval` has the arguments.

    Groups of one size that are all at one bound or the other are n passes and failures: Wilson's interval. Where all
    values are equal, the sample says nothing of their spread. With bounds between which they lie the interval is then
    the score interval of none of n, Tango's (1998) of n pairs without a difference. Without bounds there is none: NaN,
    since ends without a width would claim to be certain.
    """
    n, error, count = len(sample), sample.error, sample.count.astype(np.float64)
    if n < 2:
        return math.nan, math.nan
    each = sample.total / count
    if bounds is not None and np.ptp(count) == 0 and np.isin(each, bounds).all():
        ends = wilson(int((each == bounds[1]).sum()), n)
        return bounds[0] + ends[0] * (bounds[1] - bounds[0]), bounds[0] + ends[1] * (bounds[1] - bounds[0])
    if float(np.ptp(each)) == 0.0 or error == 0.0:
        if bounds is None or not bounds[0] <= mean <= bounds[1]:
            return math.nan, math.nan
        reach, (least, largest) = wilson(0, n)[1], bounds
        return mean - reach * (mean - least), mean + reach * (largest - mean)
    # Centred, so that squares of large values do not cancel.
    total = sample.total - mean * count
    moments = np.column_stack([total, count, total * total, total * count, count * count])
    drawn = np.concatenate([weights @ moments for weights in weights_of(n, seed)])
    shift = drawn[:, 0] / drawn[:, 1]
    square = drawn[:, 2] - 2 * shift * drawn[:, 3] + shift**2 * drawn[:, 4]
    errors = np.sqrt(np.maximum(square, 0.0) * n / (n - 1)) / drawn[:, 1]
    t_low, t_high = np.percentile(shift / np.maximum(errors, _FLOOR * error), [100 * level for level in LEVELS])
    # Bounds say how far values can be: ties among shares of passed images are no sign of rare, far larger ones.
    quantile = student(_freedom(sample) if bounds is None else n - 1)
    low, high = mean - error * max(quantile, float(t_high)), mean + error * max(quantile, -float(t_low))
    return (low, high) if bounds is None else (max(low, min(bounds[0], mean)), min(high, max(bounds[1], mean)))


def _freedom(sample: Clusters) -> float:
    """Degrees of freedom of the t interval, from 1 to N - 1: ties leave fewer.

    The square of the standard error scatters as the mean square of the distances x from the commonest value does, and
    2 / (squared coefficient of variation) are its degrees of freedom (Satterthwaite 1946): 2 N / (k - 1), with k the
    kurtosis of x, of which N - m are 0. The kurtosis of the other m is estimated without bias for normal x, (m + 2) sum
    x^4 / (sum x^2)^2, and at most 3: t intervals of heavy tails are wide enough. So m = N has N - 1, and one group
    alone that differs has 1.
    """
    n, excess = len(sample), sample.excess
    m, squares = int(np.count_nonzero(excess)), float((excess**2).sum())
    if m >= n - 1:  # no ties
        return n - 1.0
    kurtosis = min(_GAUSSIAN, (m + 2) * float((excess**4).sum()) / squares**2)
    return min(max(2 * m * n / (kurtosis * n - m), 1.0), n - 1.0)


def student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit  # every run imports this module, and few need it

    return float(stdtrit(freedom, LEVELS[1]))


def stratified(strata: Sequence[Clusters], weights: Sequence[float] | None = None, seed: int = 0) -> dict[str, float]:
    """Weighted mean of the means of strata, with a 95 % interval: groups are drawn inside their stratum.

    GenEval's overall: the strata are its six tasks, a group is a prompt with its four images.

    Args:
        strata: groups of each stratum.
        weights: of the strata, not all 0; None: equal.
        seed: of the bootstrap.

    Returns:
        `mean`, `low`, `high`, and `n`, the groups of all strata. A stratum without a value makes the mean NaN: the
        mean of the others is another number. Below `FEW` groups in all the interval is at least the t interval with
        Welch's degrees of freedom; a stratum of one group then has no interval.

    Raises ValueError: no stratum, or weights that are negative, all 0 or of another number.

    >>> one, two = Clusters(np.asarray([1.0, 0.0]), np.asarray([2, 1])), Clusters(np.asarray([1.0]), np.asarray([1]))
    >>> round(stratified([one, two])["mean"], 4)
    0.6667
    """
    share = np.ones(len(strata)) if weights is None else np.asarray(weights, dtype=np.float64)
    if not len(strata) or len(share) != len(strata) or (share < 0).any() or share.sum() <= 0:
        raise ValueError(f"{len(strata)} strata need as many weights, none negative and not all 0, got {share}")
    share = share / share.sum()
    n = sum(len(stratum) for stratum in strata)
    mean = math.fsum(w * stratum.mean for w, stratum in zip(share, strata, strict=True))
    if math.isnan(mean):
        return {"mean": math.nan, "low": math.nan, "high": math.nan, "n": n}
    rng, drawn = np.random.default_rng(seed), np.zeros(BOOTSTRAP)
    for w, stratum in zip(share, strata, strict=True):
        for start in range(0, BOOTSTRAP, _CHUNK):
            stop = min(start + _CHUNK, BOOTSTRAP)
            rows = rng.integers(len(stratum), size=(stop - start, len(stratum)))
            drawn[start:stop] += w * stratum.total[rows].sum(axis=1) / stratum.count[rows].sum(axis=1)
    low, high = map(float, np.percentile(drawn, [100 * level for level in LEVELS]))
    low, high = min(low, mean), max(high, mean)  # equal values, which sums in another order miss by rounding
    if n < FEW:
        parts = [(w * stratum.error) ** 2 for w, stratum in zip(share, strata, strict=True)]
        variance, freedom = math.fsum(parts), _welch(parts, [len(stratum) - 1 for stratum in strata])
        half = student(freedom) * math.sqrt(variance) if variance else variance
        # NaN from a stratum of one group stays NaN.
        low, high = (mean - half, mean + half) if math.isnan(half) else (min(low, mean - half), max(high, mean + half))
    return {"mean": mean, "low": low, "high": high, "n": n}


def _welch(parts: Sequence[float], freedoms: Sequence[int]) -> float:
    """Degrees of freedom of a sum of squared standard errors (Welch 1947, Satterthwaite 1946)."""
    below = math.fsum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True) if part > 0)
    return math.fsum(parts) ** 2 / below if below else 1.0


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % interval (low, high) of a share of n independent trials (Wilson 1927); NaN for n = 0.

    For one image a prompt, all prompts different. With several images a prompt `interval` is right.

    >>> [round(end, 4) for end in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if n == 0:
        return math.nan, math.nan
    z = NORMAL
    share, spread = successes / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # Exactly 0 or 1 where none or all succeed, whatever the rounding.
    return (centre - half if successes > 0 else 0.0), (centre + half if successes < n else 1.0)
