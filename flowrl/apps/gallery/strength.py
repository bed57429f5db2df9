"""Scores and diversity of a run over its strength (run/dial.py), where it was evaluated at others than 0 and 1."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.apps.gallery.charts import Axis, Series, line_chart
from flowrl.apps.gallery.results import Metric
from flowrl.apps.gallery.runs import Run, nan_mean
from flowrl.evaluation.results import Evaluation

AXES = {"strength": "--strength", "lora_scale": "--lora-scale"}


def view(run: Run, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Charts over the strength; none without an evaluation of `flowrl eval RUN --strength S` in the run folder.

    Only evaluations of the tuned weights count, with the settings of the run's own.
    """
    ends = {s: run.folder / "eval" / f"{tag}.json" for s, tag in ((0.0, "base"), (1.0, "tuned"))}
    if not all(file.is_file() for file in ends.values()):
        return []
    own = {s: Evaluation.load(file) for s, file in ends.items()}
    found: dict[str, dict[float, Evaluation]] = {name: {} for name in AXES}
    for file in sorted((run.folder / "eval-extra" / "eval").glob("evaluation-*.json")):
        known = Evaluation.load(file)
        dial = json.loads(known.made_with.get("dial", "{}"))
        if len(dial) == 1 and found.keys() >= dial.keys() and known.iteration == own[1.0].iteration:
            ((name, value),) = dial.items()
            found[name] |= {} if known.unlike(own[0.0]) else {value: known}
    lines = {name: sorted((own | each).items()) for name, each in found.items() if each}
    tables: list[tuple[str, bool, Any]] = [
        (m.label, m.percent, lambda known, m=m: known.scores.get(m.name)) for m in metrics
    ]
    tables.append(("diversity", False, lambda known: known.diversity))
    charts = []
    for label, percent, table in tables if lines else ():
        series = [
            Series(AXES[name], np.array([s for s, _ in points]), _means([table(known) for _, known in points]), True)
            for name, points in lines.items()
        ]
        if svg := line_chart(series, Axis("strength"), percent=percent):
            charts.append({"title": f"Strength: {label}", "key": label, "svg": svg})
    return charts


def _means(tables: Sequence[np.ndarray | None]) -> np.ndarray:
    """Mean of each table over its prompts and seeds, [N]; NaN where there is none."""
    return np.array([np.nan if each is None else nan_mean(np.ravel(each)) for each in tables])
