"""The best of n images of a prompt in a report: curves of base and tuned, and the base's as the rival of training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.apps.gallery.charts import Axis, Series, line_chart
from flowrl.apps.gallery.compare.curves import spent
from flowrl.apps.gallery.results import Estimate, Metric
from flowrl.apps.gallery.runs import Run, number


def view(run: Run, metrics: Sequence[Metric]) -> dict[str, Any] | None:
    """`note` and `charts` of the block of summary.json, whose images no other number is of; None without it."""
    found = run.block("best_of")
    judged = {metric: found["judges"][metric.name] for metric in metrics if metric.name in found.get("judges", {})}
    if not judged:
        return None
    charts = []
    for metric, value in judged.items():
        lines = [
            (label, [number(each["mean"]) for each in value[label]]) for label in ("base", "tuned") if label in value
        ]
        series = [Series(label, np.arange(1.0, len(y) + 1), np.asarray(y), markers=True) for label, y in lines]
        svg = line_chart(series, Axis(f"{run.noun}s of a prompt to choose from"), percent=metric.percent)
        charts.append({"title": f"Best of n: {metric.label}", "key": metric.name, "svg": svg})
    most = max(len(value["base"]) for value in judged.values())
    rivals = [_rival(run, metric, value) for metric, value in judged.items()]
    note = (
        f"Of so many {run.noun}s of a prompt the best by {found['by']} is judged by the metric: an unbiased estimate "
        f"from the seeds at hand. Such {run.noun}s were selected, and no other number is of them."
    )
    return {"note": " ".join([note, *rivals, _break_even(run, most)]).strip(), "charts": charts}


def _rival(run: Run, metric: Metric, value: dict[str, Any]) -> str:
    """The base's best of all seeds beside one image of the tuned model."""
    most, change = len(value["base"]), value["rival"][-1]
    rival = Estimate.of(change)
    ends = f" (95 % CI {metric.interval(rival)})" if rival.bounded else ""
    chose = ", which is part of what chose" if value["chose"] else ""
    return (
        f"By {metric.label}{chose}, the fair rival, the base's best of {most}, reaches "
        f"{metric.value(number(value['base'][-1]['mean']))} with {most} times the network evaluations; one tuned "
        f"{run.noun} is {metric.change(rival.mean)} beside it{ends}."
    )


def _break_even(run: Run, most: int) -> str:
    """Number of images up to which the base's best of `most` costs less than training and one each; "": not known."""
    known = spent(run).get("evaluations")
    if known is None or run.base is None or "tuned" not in run.evaluations:
        return ""
    each = run.base.num_inference_steps * (2 if run.base.guidance_scale > 1 else 1)
    count = known[-1] / each / (most - 1)
    return f"With training counted, the base's best of {most} costs less up to {count:,.0f} {run.noun}s."
