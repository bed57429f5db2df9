"""Several runs side by side, each by its own numbers: where nothing is compared by pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flowrl.apps.gallery import charts, facts, results
from flowrl.apps.gallery.compare.shared import label_of
from flowrl.apps.gallery.runs import Run


def comparison(runs: Sequence[Run], *, alike: bool) -> dict[str, Any]:
    """Table of several runs, each by its primary metric, and a chart of their evaluations if they are `alike`."""
    rows, drawn = [], []
    for number, run in enumerate(runs):
        label = label_of(runs, number)
        metric = next(iter(results.metrics_of(run)), None)
        estimates = results.estimates_of(run, metric) if metric else None
        rows.append(
            {
                "name": label,
                "status": facts.status(run),
                "algorithm": str(facts.value_at(run.config, "algorithm", "name") or results.DASH),
                "on": run.subject.on.strip(),
                "time": facts.duration(facts.seconds(run)),
                "result": results.table_row(run, metric, estimates) if metric and estimates else None,
                "change": estimates["difference"] if estimates else None,
            }
        )
        if metric:
            named = f"{label}{run.subject.on}"
            drawn.append((metric, charts.Series(named, *results.evaluated_curve(run, metric), markers=True)))
    changes = [e for e in (row["change"] for row in rows) if e and e.known]
    ends = [v for e in changes for v in (e.mean, e.low, e.high) if math.isfinite(v)]
    # One axis for all intervals, so that they can be compared.
    domain = (min([0.0, *ends]), max([0.0, *ends]))
    # Different metrics have no common unit, and no common axis.
    same_metric = alike and len({row["result"]["metric"].name for row in rows if row["result"]}) == 1
    for row in rows:
        e = row["change"]
        bar = [("difference", e.mean, e.low, e.high)] if e and same_metric else []
        row["plot"] = charts.interval_plot(bar, domain=domain, zero=True)
    curve = charts.line_chart([s for _, s in drawn], percent=drawn[0][0].percent) if same_metric else ""
    subjects = {run.subject.short for run in runs}
    short = f"{subjects.pop()} " if len(subjects) == 1 else ""
    return {"rows": rows, "curve": curve, "title": f"{short}{drawn[0][0].label} over training" if same_metric else ""}
