"""The noise of a judge: the same images, judged twice by it (`--rejudge`), and what that does to a comparison.

The floor is 1.96 standard deviations of the difference of two means over the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.runner import Task, rows_of
from flowrl.data.prompts import distinct_numbers
from flowrl.evaluation.suite import Row, outputs_of
from flowrl.statistics.repeats import noise_floor


def judge_noise(task: Task, folder: ResultsFolder) -> dict[str, dict[str, float]]:
    """Output -> what `noise_floor` says of it; {}: this judge has judged the images once."""
    before, now = folder.judged_before(), rows_of(task, folder)
    if not before:
        return {}
    shape, groups = (len(task.items), task.samples), np.array(distinct_numbers([item.text for item in task.items]))

    def table(rows: Sequence[Row | None], name: str) -> np.ndarray:
        values = [math.nan if row is None or row.scores.get(name) is None else row.scores[name] for row in rows]
        return np.array(values, dtype=np.float64).reshape(shape)

    earlier = [before.get((item.id, k)) for item, k in task.all()]
    return {name: noise_floor(table(earlier, name), table(now, name), groups) for name in outputs_of(now)}


def noise_text(noise: dict[str, dict[str, float]]) -> str:
    """The Markdown section on it; "" without one."""
    if not noise:
        return ""
    lines = ["## The judge's own noise", "", "The same images, judged twice by the same judge.", ""]
    lines += ["| output | sd of a score | floor of a difference | shift | images |", "|---|---|---|---|---|"]
    for name, found in noise.items():
        values = " | ".join(_number(found[key]) for key in ("sd", "floor", "shift"))
        lines.append(f"| {name} | {values} | {found['n']:.0f} |")
    return "\n".join([*lines, "", "A difference below the floor is within that noise.", ""])


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
