"""Statistics of fixed-seed evaluations (`flowrl/statistics/`): intervals over distinct prompts, paired differences."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.evaluation.results import Agreement, Evaluation
from flowrl.media import digests
from flowrl.statistics import paired
from flowrl.statistics.intervals import interval


def summary(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> mean with interval over distinct prompts."""
    result = {}
    for name, table in evaluation.scores.items():
        counts = np.isin(table[~np.isnan(table)], (0.0, 1.0)).all()  # then the mean is in [0, 1]
        means, bounds = paired.prompt_means(table), (0.0, 1.0) if counts else None
        result[name] = paired.over_prompts(means, evaluation.groups, bounds=bounds)
    return result


def accuracy(agreement: Agreement) -> dict[str, float]:
    """Mean with interval over captions of the held-out pairs that the network prefers as the data do."""
    return interval(agreement.right, agreement.captions, bounds=(0.0, 1.0))


def difference(base: Evaluation, tuned: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> paired difference tuned - base with interval. Raises ValueError: other prompts or seeds in one."""
    common = [name for name in base.scores if name in tuned.scores]
    return {name: paired.difference(*_tables(base, tuned, name), tuned.groups) for name in common}


def win_rate(
    base: Evaluation,
    tuned: Evaluation,
    metric: str,
    *,
    higher_is_better: bool = True,
    tie: float = 0.0,
    rows: np.ndarray | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Win rate of the tuned image over the base's of the same prompt and seed; `tie` is `eval.tie`.

    `rows` are the prompts that count, [P] bool; None: all. The margin is of all samples of the base.

    Returns:
        That of `paired.win_rate`, and the rule of its ties: `tie`; `margin`, the largest difference of a tie, in units
        of the score; `same`, the number of pairs whose images are equal in 8 bits, which are ties too.

    Raises ValueError: other prompts or seeds.
    """
    before, after = _tables(base, tuned, metric)
    margin = paired.margin(before, after, tie)
    if rows is not None:
        base, tuned = base.of(rows), tuned.of(rows)
        before, after = _tables(base, tuned, metric)
    same = digests.same(base.digests, tuned.digests)
    found = paired.win_rate(
        before, after, tuned.groups, higher_is_better=higher_is_better, tie_eps=margin, same=same, seed=seed
    )
    return {**found, "tie": tie, "margin": margin, "same": int(same.sum())}


def format_interval(value: Mapping[str, Any], form: str) -> str:
    """The interval of an estimate in words; one prompt alone has none, for which a file has null."""
    low, high = value["low"], value["high"]
    return "no interval" if low is None or math.isnan(low) else f"95 % interval {low:{form}} to {high:{form}}"


def _tables(base: Evaluation, tuned: Evaluation, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores of both for every prompt and seed, [P, S] each. Raises ValueError: their prompts or seeds differ."""
    if base.prompts != tuned.prompts:
        raise ValueError("a paired difference needs the same prompts in both evaluations")
    before, after = base.scores[metric], tuned.scores[metric]
    if before.shape != after.shape:
        raise ValueError(
            f"a paired difference needs the same seeds in both evaluations: {metric} has {before.shape[1]} and "
            f"{after.shape[1]} per prompt"
        )
    return before, after
