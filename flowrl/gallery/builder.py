"""The report: one HTML file that opens from disk.

Only text files and images of run folders are read, so a report can be built anywhere, without a model, and while the
run is under way.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from flowrl.core.contents import require_comparable
from flowrl.core.errors import ConfigError
from flowrl.core.files import writing
from flowrl.gallery import charts, images, results, treechart
from flowrl.gallery.places import PAGE, page_folder
from flowrl.gallery.results import Metric
from flowrl.gallery.runs import Run, load_run, nan_mean, number

CURVES = {
    "policy/clip_fraction": "Clip fraction",
    "grad/norm": "Gradient norm",
    "time/iteration_s": "Seconds an iteration",
    "perf/tflops": "Network TFLOP a second",
    "memory/peak_gib": "Peak memory, GiB",
}
DURING_TREES = 3
"""Number of evaluations during training whose trees are drawn, the latest ones."""


def build(run_folders: Sequence[Path], out: Path | None = None, accept_changes: bool = False) -> Path:
    """Write the report of one or several runs.

    Args:
        run_folders: folders that `flowrl train` wrote, finished or not.
        out: folder of the page; None: `<run>/gallery`, or `places.comparison_folder` for several runs.
        accept_changes: show runs that had different contents of a file side by side, without a common chart.

    Returns:
        `out / "index.html"`, a page without references to a network.

    Raises:
        ConfigError: a folder that is not a run, a damaged file, runs with different contents of a file, or a page that
            would replace a run's own report; with the file and the remedy.
        WriteError: the disk is full or not writable.
    """
    if not run_folders:
        raise ConfigError("run_folders is empty; name at least one run folder, such as runs/quickstart")
    runs = [load_run(Path(folder)) for folder in run_folders]
    changed = require_comparable([run.folder for run in runs], accept=accept_changes)
    output = page_folder([run.folder for run in runs], out) / PAGE
    views = [_view(run, f"run-{index}", output.parent) for index, run in enumerate(runs)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csp_hash"] = _csp_hash
    page = environment.get_template("index.html.j2").render(
        runs=views,
        comparison=_comparison(runs, alike=not changed) if len(runs) > 1 else None,
        selection_seed=images.SELECTION_SEED,
    )
    _write(output, page)
    return output


def _view(run: Run, anchor: str, page_folder: Path) -> dict[str, Any]:
    """Values of the template about one run."""
    metrics = results.metrics_of(run)
    estimates = {m.name: results.estimates_of(run, m) for m in metrics}
    verdict, tone = results.NO_VERDICT, "same"
    available = images.imaged(run)
    gain = np.full(available.shape, np.nan)
    if metrics:
        verdict, tone = results.verdict(run, metrics[0], estimates[metrics[0].name])
        before, after = results.paired(run, metrics[0].name)
        gain = metrics[0].sign * (after - before)
    curves, more_curves = _curves(run, metrics)

    def cards(kind: str, pairs: list[images.Pair]) -> list[dict[str, Any]]:
        return [images.card(run, metrics, pair, f"{anchor}-{kind}", page_folder) for pair in pairs if metrics]

    pairs = cards("pair", images.draw_pairs(available))
    worst = cards("worst", images.largest_drops(gain, available))
    best = cards("best", images.largest_drops(-gain, available))

    return {
        "id": anchor,
        "name": run.name,
        "finished": run.finished,
        "status": _status(run),
        "problems": run.problems,
        "verdict": verdict[:1].upper() + verdict[1:],
        "tone": tone,
        "subject": run.subject,
        "remarks": results.remarks(run, metrics, estimates),
        "facts": _facts(run),
        "before": results.settings(run.base) if run.base else "",
        "after": results.settings(run.after) if run.after else "",
        "after_label": run.after.label if run.after else "tuned",
        "primary": metrics[0] if metrics else None,
        "metrics": metrics,
        "table": [results.table_row(run, m, estimates[m.name]) for m in metrics],
        "bounded": any(e["difference"].bounded for e in estimates.values()),
        "guidance": results.guidance_sweep(run, metrics),
        "curves": curves,
        "more_curves": more_curves,
        "num_during": run.during[-1].num_distinct() if run.during else 0,
        "num_pictured": int(available.any(-1).sum()) if available.size else 0,
        "num_pairs": int(np.isfinite(gain).sum()),
        "num_worse": int((gain < 0).sum()),
        "num_better": int((gain > 0).sum()),
        "pairs": pairs,
        "worst": worst,
        "best": best,
        "film": images.film(run, metrics, page_folder),
        "trees": _trees(run, f"{anchor}-tree", page_folder),
        "prompts": _prompt_rows(run, metrics, {c["prompt_id"]: c["anchor"] for c in (*best, *worst, *pairs)}),
        "config_text": run.config_text,
        "provenance": list(_flatten(run.provenance)),
    }


def _comparison(runs: Sequence[Run], *, alike: bool) -> dict[str, Any]:
    """Table of several runs, each by its primary metric, and a chart of their evaluations if they are `alike`."""
    rows, drawn = [], []
    for run in runs:
        metric = next(iter(results.metrics_of(run)), None)
        estimates = results.estimates_of(run, metric) if metric else None
        rows.append(
            {
                "name": run.name,
                "status": _status(run),
                "algorithm": str(_get(run.config, "algorithm", "name") or results.DASH),
                "on": run.subject.on.strip(),
                "time": _duration(_seconds(run)),
                "result": results.table_row(run, metric, estimates) if metric and estimates else None,
                "change": estimates["difference"] if estimates else None,
            }
        )
        if metric:
            named = f"{run.name}{run.subject.on}"
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


def _curves(run: Run, metrics: Sequence[Metric]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(main charts, charts of all other logged numbers)."""
    by_name = {m.name: m for m in metrics}
    keys = list(dict.fromkeys(key for row in run.rows for key in row if key != "iteration"))
    points = {key: run.curve(key) for key in keys}
    points |= {f"eval/{m.name}": results.evaluated_curve(run, m) for m in metrics}
    points = {key: xy for key, xy in points.items() if np.isfinite(xy[1]).any()}
    rewards = [key for key in points if re.fullmatch(r"reward/.+_mean", key)]
    total = "reward/total_mean"
    # The total of a single reward of weight one is the same curve.
    if any(key != total and np.array_equal(points[key][1], points[total][1]) for key in rewards if total in points):
        rewards.remove(total)
    evaluated = [f"eval/{m.name}" for m in metrics if f"eval/{m.name}" in points]
    evaluated += [key for key in points if key.startswith("eval/") and key not in evaluated]

    # One axis for all: evaluations need not begin with the first row.
    x_range = (run.rows[0]["iteration"], max(run.rows[-1]["iteration"], run.iterations)) if run.rows else None

    def chart(key: str, title: str, metric: str = "") -> dict[str, Any]:
        sparse = key.startswith("eval/")
        base = (
            results.level_while_training(run, run.base, by_name[metric]) if sparse and metric in by_name else math.nan
        )
        svg = charts.line_chart(
            [charts.Series(title, *points[key], markers=sparse)],
            x_range=x_range,
            baseline=base if math.isfinite(base) else None,
            percent=metric in by_name and by_name[metric].percent,
        )
        return {"title": title, "key": key, "svg": svg}

    def name_of(metric: str) -> str:
        return by_name[metric].label if metric in by_name else metric.replace("_", " ")

    main = []
    for key in rewards:
        metric = key.removeprefix("reward/").removesuffix("_mean")
        main.append(chart(key, f"Training reward: {name_of(metric)}", metric))
    for key in evaluated:
        metric = key.removeprefix("eval/")
        short = "Held-out pairs" if metric == "implicit_accuracy" else run.subject.short
        main.append(chart(key, f"{short}: {name_of(metric)}", metric))
    main += [chart(key, title) for key, title in CURVES.items() if key in points]
    phases = [key for key in points if key.startswith("time/") and key not in CURVES]
    if phases:
        series = [charts.Series(key.removeprefix("time/").removesuffix("_s"), *points[key]) for key in phases]
        svg = charts.line_chart(series, x_range=x_range)
        main.append({"title": "Seconds by phase", "key": ", ".join(phases), "svg": svg})
    shown = {entry["key"] for entry in main} | {total, *phases}
    return main, [chart(key, key) for key in sorted(points) if key not in shown]


def _trees(run: Run, anchor: str, page_folder: Path) -> dict[str, Any] | None:
    """Trees of the base, the latest evaluations during training and the tuned model, with common colours."""
    during = sorted(
        (tree for tag, tree in run.trees.items() if tag.startswith("iteration-")), key=lambda t: t.iteration
    )
    chosen = [run.trees.get("base"), *during[-DURING_TREES:], run.trees.get("tuned")]
    result = [tree for tree in chosen if tree is not None]
    if not result:
        return None
    ranges, drawings = treechart.Ranges.of(result), []
    for tree in result:
        name = f"{anchor}-{tree.tag}"
        rows = -(-len(tree.leaves) // tree.columns)
        sheet = images.embed(tree.sheet, images.SHEET_PX, page_folder, cells=max(tree.columns, rows))
        drawings.append(
            {
                "id": name,
                "label": tree.label,
                "caption": treechart.caption(tree),
                "note": tree.note,
                "svg": treechart.draw(tree, ranges, sheet, name),
            }
        )
    last, key = result[-1], treechart.legend(result, ranges)
    return {"method": last.method.replace("_", " "), "prompt": last.prompt, "legend": key, "drawings": drawings}


def _prompt_rows(run: Run, metrics: Sequence[Metric], anchors: dict[int, str]) -> list[dict[str, Any]]:
    """A row for each prompt that base and tuned share: means over the seeds, and the anchor of its images."""
    if run.base is None:
        return []
    same = results.shared(run)
    columns = []
    for metric in metrics:
        before, after = (nan_mean(table) for table in results.paired(run, metric.name))
        columns.append((metric, before, after))
    rows = []
    for p in np.flatnonzero(same.any(-1)) if same.size else ():
        cells = []
        for metric, before, after in columns:
            delta = after[p] - before[p]
            texts = (metric.value(before[p], unit=""), metric.value(after[p], unit=""), metric.change(delta))
            cells.append({"before": texts[0], "after": texts[1], "change": texts[2], "tone": metric.tone(delta)})
        rows.append({"prompt_id": int(p), "text": run.base.prompts[p], "anchor": anchors.get(int(p)), "cells": cells})
    return rows


def _status(run: Run) -> str:
    planned = number(run.config.get("iterations"))
    done = f"{run.iterations} of {planned:.0f} iterations" if math.isfinite(planned) else f"{run.iterations} iterations"
    return f"{run.summary.get('status') or 'not finished'}, {done}"


def _seconds(run: Run) -> float:
    """Wall time of the summary; while there is none, the sum over the iterations."""
    seconds = number(run.summary.get("seconds"))
    return seconds if math.isfinite(seconds) else float(np.nansum(run.curve("time/iteration_s")[1]))


def _duration(seconds: float) -> str:
    """A time as text.

    >>> _duration(170.2), _duration(45.0), _duration(7325.0)
    ('2 min 50 s', '45 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _facts(run: Run) -> list[tuple[str, str]]:
    """(label, text) of the known facts of a run, for the header."""
    config = run.config
    rank = _get(config, "model", "lora", "rank")
    # An explicit null is full fine-tuning; a missing key is not.
    full = "full fine-tuning" if "lora" in (config.get("model") or {}) and rank is None else None
    if any("noise/prior" in row for row in run.rows):
        full = "learned initial noise, the network frozen"
    model = [_get(config, "model", "name"), _get(config, "model", "path"), f"LoRA rank {rank}" if rank else full]
    sampler = [_get(config, "rollout", "sampler", "name")]
    steps, guidance = _get(config, "rollout", "num_inference_steps"), _get(config, "rollout", "guidance_scale")
    sampler += [f"{steps} steps" if steps else None, f"guidance {guidance}" if guidance is not None else None]
    rewards = [
        f"{' '.join(filter(None, (entry.get('prefix'), entry.get('name') or entry.get('path'))))} x "
        f"{entry.get('weight', 1.0):g}"
        for entry in (config.get("rewards") or [])
    ]
    seeds = ", ".join(map(str, run.base.seeds)) if run.base else ""
    hardware = [run.provenance.get(key) for key in ("hardware", "device", "gpu", "cpu")]
    facts = {
        "Model": ", ".join(str(part) for part in model if part),
        "Algorithm": str(_get(config, "algorithm", "name") or ""),
        "Rollout": ", ".join(str(part) for part in sampler if part),
        "Rewards": ", ".join(rewards),
        "Evaluated on": _evaluated_on(run),
        "Seeds": f"training {config.get('seed', results.DASH)}" + (f"; evaluation {seeds}" if seeds else ""),
        "Hardware": next((str(h) for h in hardware if h), ""),
        "Time": _duration(_seconds(run)),
        "Started": str(run.provenance.get("started") or ""),
        "Commit": re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"\1", str(run.provenance.get("commit") or "")),
    }
    return [(label, text) for label, text in facts.items() if text]


def _evaluated_on(run: Run) -> str:
    """Number and kind of the prompts, and the source of a share."""
    if run.base is None or not run.base.prompts:
        return ""
    held_out = run.summary.get("held_out")
    share = held_out.get("source") if isinstance(held_out, dict) and held_out.get("share") is not None else None
    text = f"{run.base.num_distinct()} {run.subject.name}".replace("its own", "of its own")
    return f"{text} ({share})" if share else text


def _get(tree: Any, *path: str) -> Any:
    """`tree[path[0]][path[1]]...`; None if a key is missing, as in an older run."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _csp_hash(script: str) -> str:
    """Source expression of the content security policy that allows this script alone."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _write(output: Path, page: str) -> None:
    """Write under a temporary name and rename, so that no reader sees an incomplete page."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with writing(output, "the run itself is safe, and flowrl gallery RUN builds its report"):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            # "replace": a lone surrogate in a prompt cannot be encoded.
            temporary.write_bytes(page.encode("utf-8", "replace"))
            os.replace(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
