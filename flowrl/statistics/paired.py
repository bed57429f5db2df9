"""Paired comparisons of two models on the same prompts and the same noise: differences, win rates, tests.

P prompts, S seeds, N groups of prompts. Tables are [P, S] float64, NaN where an image could not be scored.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from flowrl.statistics.intervals import FEW, LEVELS, Bounds, Clusters, clusters, interval, of_few, resamples

TIE_SHARE = 0.05
"""Largest difference of a tie as a share of the base's std, where nothing else is asked for: the default `eval.tie`."""
TIE = 1e-6
"""Scores that differ by at most this are equal."""
FLIPS = 10_000

Side = Literal["two-sided", "greater", "less"]


def prompt_means(table: np.ndarray) -> np.ndarray:
    """Mean over seeds of a table [P, S], [P]; NaN where no seed was scored."""
    valid = ~np.isnan(table)
    count = valid.sum(axis=1)
    total = np.where(valid, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def over_prompts(per_prompt: np.ndarray, groups: np.ndarray, bounds: Bounds | None = None) -> dict[str, float]:
    """`interval` of [P] values, drawing distinct prompts; n is the number of those with a value."""
    scored = np.unique(groups[~np.isnan(per_prompt)])
    return interval(per_prompt, groups, bounds=bounds) | {"n": len(scored)}


def difference(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Mean paired difference after - before of two tables, with its interval over distinct prompts.

    Of scores that are all 0 or 1 it is known that no difference is beyond -1 or 1.
    """
    bounds = (-1.0, 1.0) if _passed(before, after) else None
    return over_prompts(prompt_means(after - before), groups, bounds)


def beside(
    before: np.ndarray, after: np.ndarray | None, groups: np.ndarray, bounds: Bounds | None = None
) -> dict[str, dict[str, float]]:
    """`base` and, with `after`, `tuned` and their paired `difference`: means with intervals over distinct prompts."""
    found = {"base": over_prompts(prompt_means(before), groups, bounds)}
    if after is None:
        return found
    tuned = over_prompts(prompt_means(after), groups, bounds)
    return found | {"tuned": tuned, "difference": difference(before, after, groups)}


def margin(before: np.ndarray, after: np.ndarray, share: float) -> float:
    """Largest difference of a tie, in units of the scores: `share` times the standard deviation of the first model's.

    The deviation is that of all finite samples of `before` (divided by their number), whatever their prompts. Scores
    that are all 0 or 1, in both, are ties where they are equal: there it is `TIE`, which it is never below. Both have
    any shape, NaN where there is no score; `share` is from 0; 0: scores must be equal.

    >>> margin(np.asarray([[0.0, 2.0], [np.nan, 4.0]]), np.asarray([[0.5]]), 0.5) == 0.5 * (8 / 3) ** 0.5
    True
    """
    scores = before[np.isfinite(before)]
    if _passed(before, after) or not scores.size:
        return TIE
    return max(share * float(scores.std()), TIE)


def outcomes(
    before: np.ndarray,
    after: np.ndarray,
    *,
    higher_is_better: bool = True,
    tie_eps: float = TIE,
    same: np.ndarray | None = None,
) -> np.ndarray:
    """1 where the second model wins, 0 where it loses, 1/2 for a tie, NaN without both scores; shaped like the scores.

    `tie_eps`: largest difference of a tie (`margin`). `same`: whether the two samples are the same, so that they tie
    whatever their scores, bool of the same shape; None: not known.

    >>> outcomes(np.asarray([1.0, 1.0, 1.0, 1.0]), np.asarray([2.0, 0.0, 1.2, np.nan]), tie_eps=0.5).tolist()
    [1.0, 0.0, 0.5, nan]
    """
    change = (after - before) * (1 if higher_is_better else -1)
    tied = np.abs(change) <= tie_eps if same is None else (np.abs(change) <= tie_eps) | same
    return np.where(np.isnan(change), np.nan, np.where(tied, 0.5, (change > 0).astype(np.float64)))


def win_rate(
    before: np.ndarray,
    after: np.ndarray,
    groups: np.ndarray,
    *,
    higher_is_better: bool = True,
    tie_eps: float = TIE,
    same: np.ndarray | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Win rate of the second image over the first of the same prompt and seed; ties are kept apart.

    Scores are [P, S], `groups` [P] int64 from 0, equal for prompts that are the same; the rest as in `outcomes`: the
    `tie_eps` of a judge with steps is half a step. `seed`: of the bootstrap.

    Returns:
        `rate` = wins / (wins + losses) with its 95 % `low`, `high` over distinct prompts, `n` images that are not tied,
        `wins`, `losses`, `ties`, `tie_rate` among all images with both scores.
    """
    found = outcomes(before, after, higher_is_better=higher_is_better, tie_eps=tie_eps, same=same)
    wins, losses, ties = ((found == value).sum(axis=1) for value in (1.0, 0.0, 0.5))
    decided = int(wins.sum() + losses.sum())
    result: dict[str, float] = {"wins": int(wins.sum()), "losses": int(losses.sum()), "ties": int(ties.sum())}
    result |= {"n": decided, "tie_rate": result["ties"] / max(decided + result["ties"], 1)}
    if not decided:
        return result | {"rate": math.nan, "low": math.nan, "high": math.nan}
    wins, losses = (_by_group(part, groups) for part in (wins, losses))
    result["rate"] = result["wins"] / decided
    deciding = wins + losses > 0
    sample = Clusters(wins[deciding].astype(np.float64), (wins + losses)[deciding])
    if len(sample) < FEW or result["rate"] in (0.0, 1.0):
        low, high = of_few(sample, result["rate"], seed, (0.0, 1.0))
        return result | {"low": low, "high": high}
    rates = []
    for rows in resamples(len(wins), seed):
        won, lost = wins[rows].sum(axis=1), losses[rows].sum(axis=1)
        # A resample of ties alone decides nothing: half.
        rates.append(np.where(won + lost > 0, won / np.maximum(won + lost, 1), 0.5))
    low, high = np.percentile(np.concatenate(rates), [100 * level for level in LEVELS])
    return result | {"low": float(low), "high": float(high)}


def win_share(
    before: np.ndarray,
    after: np.ndarray,
    groups: np.ndarray,
    *,
    higher_is_better: bool = True,
    tie_eps: float = TIE,
    same: np.ndarray | None = None,
) -> dict[str, float]:
    """Share of wins of the second model where a tie is half a win: mean over prompts of the mean over seeds.

    With the models exchanged it is one minus this, ends too; equal models have 1/2. Arguments: `win_rate`.
    """
    found = outcomes(before, after, higher_is_better=higher_is_better, tie_eps=tie_eps, same=same)
    return over_prompts(prompt_means(found), groups, bounds=(0.0, 1.0))


def sign_test(per_prompt: np.ndarray, *, side: Side = "two-sided", tie_eps: float = TIE) -> float:
    """p of the sign test on [P] differences: with no difference a gain is as likely as a loss. Ties are left out.

    NaN and duplicated prompts are left to the caller (`group_means`). Without a decided prompt p is 1.

    >>> sign_test(np.asarray([1.0, 2.0, 3.0, 0.0, -1.0]))
    0.625
    """
    from scipy import stats  # takes most of a second, and every run imports this module

    gains, losses = int((per_prompt > tie_eps).sum()), int((per_prompt < -tie_eps).sum())
    return float(stats.binomtest(gains, gains + losses, 0.5, alternative=side).pvalue) if gains + losses else 1.0


def wilcoxon(per_prompt: np.ndarray, *, side: Side = "two-sided", tie_eps: float = TIE) -> float:
    """p of Wilcoxon's signed-rank test on [P] differences: they scatter symmetrically about 0. Ties are left out."""
    from scipy import stats

    decided = per_prompt[np.abs(per_prompt) > tie_eps]
    if not len(decided):
        return 1.0
    _, p = stats.wilcoxon(decided, alternative=side)
    return float(np.asarray(p))


def group_means(per_prompt: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Mean of each group of [P] values that has one, [N]."""
    sample = clusters(per_prompt, groups)
    return sample.total / sample.count


def flip_tests(columns: np.ndarray, groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """Two-sided p of M paired differences [M, P], [M]: if two models are alike, the sign of a group is a coin.

    A permutation test of the mean (Fisher 1935) with `FLIPS` draws of N signs, common to all columns; the least p is
    1 / (FLIPS + 1). It tests the mean, as the interval does, and needs no distribution. NaN counts as no prompt; a
    column without a value has p = 1.
    """
    if not len(columns):
        return np.empty(0)
    place, rng = np.unique(groups, return_inverse=True)[1], np.random.default_rng(seed)
    known = np.where(np.isnan(columns), 0.0, columns)
    totals = np.stack([np.bincount(place, row, minlength=place.max(initial=-1) + 1) for row in known])
    reached, level = np.zeros(len(columns)), np.abs(totals.sum(axis=1))
    slack = 1e-9 * np.abs(totals).sum(axis=1)
    for _ in range(0, FLIPS, 1000):
        signs = 2.0 * rng.integers(2, size=(1000, totals.shape[1])) - 1.0
        # Equal sums in another order differ by rounding alone.
        reached += (np.abs(signs @ totals.T) >= level - slack).sum(axis=0)
    return (1 + reached) / (1 + FLIPS)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p of M tests (Holm 1979), [M]: below 0.05 in all of them no true null falls with 95 %.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = p[order] * np.arange(len(p), 0, -1)
    result = np.empty_like(p)
    result[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return result


def _passed(*tables: np.ndarray) -> bool:
    """Whether all scores of the tables are 0 or 1."""
    return all(np.isin(table[~np.isnan(table)], (0.0, 1.0)).all() for table in tables)


def _by_group(counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sums of counts [P] over each of N groups, [N]."""
    total = np.zeros(groups.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(total, groups, counts)
    return total
