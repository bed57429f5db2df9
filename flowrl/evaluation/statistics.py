"""Statistics of fixed-seed evaluations: intervals over distinct prompts, paired differences, win rates."""

from __future__ import annotations

import numpy as np

from flowrl.evaluation.results import Agreement, Evaluation

BOOTSTRAP = 10_000


def interval(per_prompt: np.ndarray, groups: np.ndarray | None = None, seed: int = 0) -> dict[str, float]:
    """Mean and 95 % percentile bootstrap over prompts of [P] values; n prompts are not NaN and count.

    With `groups` [P] int64 the bootstrap draws whole groups: the values of a group are not independent.

    >>> interval(np.asarray([0.5, 0.5]))
    {'mean': 0.5, 'low': 0.5, 'high': 0.5, 'n': 2}
    """
    valid = ~np.isnan(per_prompt)
    values = per_prompt[valid]
    if not len(values):
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "n": 0}
    rng = np.random.default_rng(seed)
    means = np.empty(BOOTSTRAP)
    place = np.arange(len(values)) if groups is None else np.unique(groups[valid], return_inverse=True)[1]
    count = np.bincount(place)
    total = np.bincount(place, values)
    for start in range(0, BOOTSTRAP, 1000):
        rows = rng.integers(len(count), size=(1000, len(count)))
        # Where every group has one value the sums of counts are known.
        drawn = len(count) if (count == 1).all() else count[rows].sum(axis=1)
        means[start : start + 1000] = total[rows].sum(axis=1) / drawn
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "n": len(values)}


def _prompt_means(table: np.ndarray) -> np.ndarray:
    """Mean over seeds, [P]; NaN where no seed was scored."""
    valid = ~np.isnan(table)
    count = valid.sum(axis=1)
    total = np.where(valid, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _over_prompts(per_prompt: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """`interval` of [P] values, resampling distinct prompts; n is the number of those with a value."""
    scored = np.unique(groups[~np.isnan(per_prompt)])
    return interval(per_prompt, groups) | {"n": len(scored)}


def summary(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> mean with interval over distinct prompts."""
    groups = evaluation.groups
    return {name: _over_prompts(_prompt_means(table), groups) for name, table in evaluation.scores.items()}


def accuracy(agreement: Agreement) -> dict[str, float]:
    """Mean with interval over captions of the held-out pairs that the network prefers as the data do."""
    return interval(agreement.right, agreement.captions)


def difference(base: Evaluation, tuned: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> paired difference tuned - base with interval; both must hold the same prompts and seeds."""
    common, groups = [name for name in base.scores if name in tuned.scores], tuned.groups
    return {name: _over_prompts(_prompt_means(_paired(base, tuned, name)), groups) for name in common}


def _paired(base: Evaluation, tuned: Evaluation, metric: str) -> np.ndarray:
    """tuned - base for every prompt and seed, [P, S].

    Raises:
        ValueError: their prompts or seeds differ.
    """
    if base.prompts != tuned.prompts:
        raise ValueError("a paired difference needs the same prompts in both evaluations")
    before, after = base.scores[metric], tuned.scores[metric]
    if before.shape != after.shape:
        raise ValueError(
            f"a paired difference needs the same seeds in both evaluations: {metric} has {before.shape[1]} and "
            f"{after.shape[1]} per prompt"
        )
    return after - before


def _by_group(counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sums of counts [P] over each of N groups, [N]."""
    total = np.zeros(groups.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(total, groups, counts)
    return total


def win_rate(
    base: Evaluation, tuned: Evaluation, metric: str, *, higher_is_better: bool = True, seed: int = 0
) -> dict[str, float]:
    """Win rate of the tuned image over the base's of the same prompt and seed; equal scores are ties, kept apart.

    Args:
        base: before training.
        tuned: after it, of the same prompts and seeds.
        metric: the score that decides.
        higher_is_better: direction of the metric.
        seed: of the bootstrap.

    Returns:
        `rate` = wins / (wins + losses) with its 95 % percentile bootstrap `low`, `high` over distinct prompts
        (whose seeds belong together), `n` images that are not tied, `wins`, `losses`, `ties`, and `tie_rate` among
        all images with both scores.

    Raises:
        ValueError: other prompts or seeds.
    """
    change = _paired(base, tuned, metric) * (1 if higher_is_better else -1)
    # Older files hold six digits, and one of the two may be such a file.
    wins, losses, ties = (part.sum(axis=1) for part in (change > 1e-6, change < -1e-6, abs(change) <= 1e-6))
    decided = int(wins.sum() + losses.sum())
    result: dict[str, float] = {"wins": int(wins.sum()), "losses": int(losses.sum()), "ties": int(ties.sum())}
    result |= {"n": decided, "tie_rate": result["ties"] / max(decided + result["ties"], 1)}
    if not decided:
        return result | {"rate": float("nan"), "low": float("nan"), "high": float("nan")}
    wins, losses = (_by_group(part, tuned.groups) for part in (wins, losses))
    rng, rates = np.random.default_rng(seed), np.empty(BOOTSTRAP)
    for start in range(0, BOOTSTRAP, 1000):
        rows = rng.integers(len(wins), size=(1000, len(wins)))
        won, lost = wins[rows].sum(axis=1), losses[rows].sum(axis=1)
        # A resample of ties alone decides nothing: half.
        rates[start : start + 1000] = np.where(won + lost > 0, won / np.maximum(won + lost, 1), 0.5)
    low, high = np.percentile(rates, [2.5, 97.5])
    return result | {"rate": result["wins"] / decided, "low": float(low), "high": float(high)}
