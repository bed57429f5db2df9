"""Leader tables: levels and paired differences of every run, by one metric. M runs, P shared prompts."""

from dataclasses import dataclass

import numpy as np

from flowrl.apps.gallery import results
from flowrl.apps.gallery.certainty import told_apart
from flowrl.apps.gallery.compare.shared import Shared, SharedMetric
from flowrl.apps.gallery.results import Estimate
from flowrl.statistics.intervals import intervals
from flowrl.statistics.paired import flip_tests, holm, outcomes, prompt_means
from flowrl.statistics.repeats import over_seeds

SURE = 0.05
"""Largest p, after Holm's correction, of a marked comparison."""


@dataclass(frozen=True, slots=True)
class Change:
    """A paired difference with its interval and its p after Holm's correction."""

    estimate: Estimate
    p: float
    told: tuple[int, int]
    """(distinct prompts on which the two differ, all of them)."""

    @property
    def sure(self) -> bool:
        return self.p < SURE


@dataclass(frozen=True, slots=True)
class Standing:
    """One run by one metric, on what all share."""

    run: int
    base: Estimate
    tuned: Estimate
    over_base: Change
    over_leader: Change | None
    """None: this run is the leader."""
    win: Estimate
    """Share of wins against its base, a tie counting half."""
    at_best: Estimate
    """Paired difference to its base, each at its best guidance; NaN: not sought."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs that differ in their seed alone, by one metric."""

    runs: tuple[int, ...]
    tuned: dict[str, float]
    gain: dict[str, float]
    """`over_seeds` of the tuned level and of the paired difference to the base."""


def standings(shared: Shared, of: SharedMetric) -> list[Standing]:
    """All runs with the metric, the best tuned mean first; p-values are corrected over all comparisons of the list."""
    metric, members = of.metric, of.members
    # A prompt that one of two images has no score for is in no difference of the two.
    both = [(shared.table(i, metric, base=True), shared.table(i, metric, base=False)) for i in members]
    before, after = (np.stack([prompt_means(table) for table in tables]) for tables in zip(*both, strict=True))
    gains = np.stack([prompt_means(tuned - base) for base, tuned in both])
    # A run without any score is the last one, in both directions.
    means = np.asarray([metric.sign * np.nanmean(row) if np.isfinite(row).any() else -np.inf for row in after])
    order = [int(k) for k in np.argsort(-means, kind="stable")]
    lead = both[order[0]][1]
    behind = np.stack([prompt_means(tuned - lead) for _, tuned in both])
    bounds = (0.0, 1.0) if metric.percent else None
    levels = intervals(np.concatenate([before, after]), shared.groups, bounds=bounds)
    rules = [{"tie_eps": shared.margin(i, metric), "same": shared.same(i)} for i in members]
    won = [outcomes(*pair, higher_is_better=metric.sign > 0, **rule) for pair, rule in zip(both, rules, strict=True)]
    shares = intervals(np.stack([prompt_means(each) for each in won]), shared.groups, bounds=(0.0, 1.0))
    others = order[1:]
    changes = np.concatenate([gains, behind[others]])
    differences = intervals(changes, shared.groups, bounds=(-1.0, 1.0) if metric.percent else None)
    p = holm(flip_tests(changes, shared.groups).tolist())
    apart = [told_apart(np.zeros((len(row), 1)), row[:, None], shared.groups) for row in changes]
    found = [Change(Estimate.of(e), float(value), told) for e, value, told in zip(differences, p, apart, strict=True)]
    count, place = len(members), {k: len(members) + n for n, k in enumerate(others)}
    return [
        Standing(
            run=members[k],
            base=Estimate.of(levels[k]),
            tuned=Estimate.of(levels[count + k]),
            over_base=found[k],
            over_leader=found[place[k]] if k in place else None,
            win=Estimate.of(shares[k]),
            at_best=_at_best(shared, of, members[k]),
        )
        for k in order
    ]


def _at_best(shared: Shared, of: SharedMetric, run: int) -> Estimate:
    base, tuned = (results.best_evaluation(shared.runs[run], name) for name in ("base", "tuned"))
    if base is None or tuned is None:
        return Estimate()
    change = prompt_means(shared.scores(tuned, of.metric) - shared.scores(base, of.metric))
    return Estimate.of(intervals(change[None], shared.groups, bounds=(-1.0, 1.0) if of.metric.percent else None)[0])


def recipe(shared: Shared, of: SharedMetric, runs: tuple[int, ...]) -> Recipe:
    """Mean, spread over seeds and interval of runs of one recipe."""
    tables = [(shared.table(i, of.metric, base=True), shared.table(i, of.metric, base=False)) for i in runs]
    tuned = np.stack([prompt_means(after) for _, after in tables])
    gain = np.stack([prompt_means(after - before) for before, after in tables])
    level, change = ((0.0, 1.0), (-1.0, 1.0)) if of.metric.percent else (None, None)
    return Recipe(runs, over_seeds(tuned, shared.groups, level), over_seeds(gain, shared.groups, change))
