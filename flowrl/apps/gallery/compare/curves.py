"""The evaluated metric over iterations, samples, network evaluations and seconds, and results over costs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.apps.gallery import charts, facts
from flowrl.apps.gallery.charts import Axis, Point, Series, Style
from flowrl.apps.gallery.compare.scores import Standing
from flowrl.apps.gallery.compare.shared import Shared, SharedMetric, label_of
from flowrl.apps.gallery.results import Metric
from flowrl.apps.gallery.runs import Evaluation, Run, nan_mean, number, value_at
from flowrl.core.assets import table
from flowrl.statistics.paired import prompt_means

LAST_ROWS = 10
"""Rows of metrics.jsonl over which the KL at the end is averaged."""
KL = "policy/kl_reference"


def over_training(
    shared: Shared, of: SharedMetric, styles: dict[int, Style], subject: str, places: np.ndarray
) -> tuple[list[dict[str, Any]], list[str]]:
    """(one chart for each quantity, sentences on what is missing); means over `places`, those of `curve_places`."""
    found = {i: _trajectory(shared, i, of.metric, places) for i in of.members}
    used = {i: spent(shared.runs[i]) for i in of.members}
    last = {name: max((used[i][name][-1] for i in of.members if name in used[i]), default=0.0) for name in QUANTITIES}
    drawn, missing = [], []
    texts = _texts(shared, places)
    other = [label_of(shared.runs, i) for i in of.members if not all(_has(e, texts) for e in shared.runs[i].during)]
    if other:
        missing.append(f"evaluations during training with other prompts are left out: {', '.join(other)}.")
    for name, words in QUANTITIES.items():
        without = [label_of(shared.runs, i) for i in of.members if name not in used[i]]
        lines = []
        for i in of.members:
            if name in used[i]:
                iterations, values = found[i]
                x = np.interp(iterations, np.arange(len(used[i][name])), used[i][name])
                known = np.isfinite(values)
                lines.append(Series(label_of(shared.runs, i), x[known], values[known], markers=True, style=styles[i]))
        axis = _axis(words, last[name]) if name == "seconds" else Axis(words)
        svg = charts.line_chart(lines, axis, percent=of.metric.percent)
        drawn.append({"title": f"{subject}{of.metric.label} over {_SHORT[name]}", "key": name, "svg": svg})
        if without and lines:
            missing.append(f"{words}: not logged by {', '.join(without)}.")
    return [chart for chart in drawn if chart["svg"]], missing


QUANTITIES, _SHORT = (table(Path(__file__).parents[1] / "tables.yaml")[part] for part in ("quantities", "short"))


def over_costs(
    shared: Shared, of: SharedMetric, table: Sequence[Standing], styles: dict[int, Style], subject: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """(tuned result against KL, wall-clock and CPU time, sentences on runs without one)."""
    rows = {entry.run: entry.tuned for entry in table}
    costs = {
        "kl": {i: float(nan_mean(shared.runs[i].curve(KL)[1][-LAST_ROWS:])) for i in rows},
        "wall": {i: facts.seconds(shared.runs[i]) for i in rows},
        "cpu": {i: cpu_seconds(shared.runs[i]) for i in rows},
    }
    words = {"kl": "KL to the reference at the end", "wall": "time", "cpu": "CPU time of training"}
    drawn, missing = [], []
    for name, cost in costs.items():
        known = {i: value for i, value in cost.items() if math.isfinite(value) and (name == "kl" or value > 0)}
        axis = Axis(words[name]) if name == "kl" else _axis(words[name], max(known.values(), default=0.0))
        marks = [
            Point(label_of(shared.runs, i), styles[i], x, rows[i].mean, rows[i].low, rows[i].high)
            for i, x in known.items()
        ]
        svg = charts.points(marks, axis, percent=of.metric.percent, sign=of.metric.sign)
        drawn.append({"title": f"{subject}{of.metric.label} against {words[name]}", "key": name, "svg": svg})
        without = [label_of(shared.runs, i) for i in rows if i not in known]
        if not known:
            missing.append(f"{words[name]}: no run has logged it.")
        elif without:
            missing.append(f"{words[name]}: not logged by {', '.join(without)}.")
    return [chart for chart in drawn if chart["svg"]], missing


def cpu_seconds(run: Run) -> float:
    """CPU time of the training iterations; NaN: not logged."""
    spent = run.curve("perf/cpu_s")[1]
    return float(np.nansum(spent)) if np.isfinite(spent).any() else math.nan


def samples_per_iteration(run: Run) -> float:
    """Samples that an iteration trains on; NaN: the configuration does not say."""
    return math.prod(number(value_at(run.config, "rollout", key)) for key in ("prompts_per_iteration", "group_size"))


def curve_places(shared: Shared) -> np.ndarray:
    """Shared places that every evaluation during training of every run has too; without any, all shared ones."""
    during = [e for i in shared.compared for e in shared.runs[i].during]
    kept = [p for p, text in _texts(shared, shared.places).items() if all(_has(e, {p: text}) for e in during)]
    return np.asarray(kept, dtype=np.int64) if kept else shared.places


def _texts(shared: Shared, places: np.ndarray) -> dict[int, str]:
    """Shared place -> prompt, of `places`."""
    texts = dict(zip(shared.places.tolist(), shared.prompts, strict=True))
    return {p: texts[p] for p in places.tolist()}


def _has(evaluation: Evaluation, texts: Mapping[int, str]) -> bool:
    """Whether an evaluation has these prompts at their places."""
    return all(p < len(evaluation.prompts) and evaluation.prompts[p] == text for p, text in texts.items())


def _trajectory(shared: Shared, number_of: int, metric: Metric, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(iterations [N], means [N]) of the base, the evaluations during training, and the tuned model."""
    run = shared.runs[number_of]
    base, after = run.both
    known: dict[float, float] = {0.0: _mean(base, metric, places, shared.seeds)}
    texts = _texts(shared, places)
    for evaluation in (e for e in run.during if _has(e, texts)):
        known[float(evaluation.iteration)] = _mean(evaluation, metric, places, shared.seeds)
    known[float(after.iteration or run.iterations)] = _mean(after, metric, places, shared.seeds)
    order = sorted(known)
    return np.asarray(order), np.asarray([known[key] for key in order])


def _mean(evaluation: Evaluation, metric: Metric, places: np.ndarray, seeds: Sequence[int]) -> float:
    scores = evaluation.scores.get(metric.name)
    columns = [evaluation.seeds.index(seed) for seed in seeds if seed in evaluation.seeds]
    inside = places[places < len(evaluation.prompts)]
    if scores is None or not columns or not len(inside):
        return math.nan
    return float(nan_mean(prompt_means(np.where(np.isfinite(scores), scores, np.nan)[inside][:, columns])))


def spent(run: Run) -> dict[str, np.ndarray]:
    """Quantity -> what was spent after 0, 1, ... iterations, [N + 1]; a quantity that was not logged is missing."""
    count = max(run.iterations, run.rows[-1]["iteration"] if run.rows else 0)
    result = {"iterations": np.arange(count + 1, dtype=float)}
    samples = samples_per_iteration(run)
    if math.isfinite(samples) and samples > 0:
        result["samples"] = samples * result["iterations"]
        evaluations = _each(run, "nfe/rollout", count) + _each(run, "nfe/train", count)
        if np.isfinite(evaluations).all() and evaluations.any():
            result["evaluations"] = np.concatenate([[0.0], np.cumsum(samples * evaluations)])
    seconds = _each(run, "time/iteration_s", count)
    if np.isfinite(seconds).all() and seconds.any():
        result["seconds"] = np.concatenate([[0.0], np.cumsum(seconds)])
    return result


def _each(run: Run, key: str, count: int) -> np.ndarray:
    """Value of each iteration, [count]; a missing one is the mean of the others, NaN where none is known."""
    x, y = run.curve(key)
    values = np.full(count, nan_mean(y) if len(y) else math.nan)
    known = np.isfinite(y) & (x >= 1)
    values[x[known].astype(int) - 1] = y[known]
    return values


def _axis(words: str, most: float) -> Axis:
    """Time in the unit that fits."""
    for least, unit, size in ((7200, "hours", 3600), (180, "minutes", 60)):
        if most >= least:
            return Axis(f"{words}, {unit}", 1 / size)
    return Axis(f"{words}, seconds")
