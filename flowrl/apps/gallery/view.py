"""Values of the template's part about one run."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.apps.gallery import best_of, charts, facts, images, previews, results, strength, treechart
from flowrl.apps.gallery.album import PAGE_BYTES, Album
from flowrl.apps.gallery.images import Place
from flowrl.apps.gallery.pairs import Cards, Page, collect
from flowrl.apps.gallery.results import Metric
from flowrl.apps.gallery.runs import Run, nan_mean
from flowrl.apps.gallery.tags import in_order
from flowrl.apps.plain_text import Named
from flowrl.core.assets import table
from flowrl.media import media
from flowrl.run.changes import leaves

CURVES: dict[str, str] = table(Path(__file__).with_name("tables.yaml"))["curves"]
DURING_TREES = 3
"""Number of evaluations during training whose trees are drawn, the latest ones."""


def view(run: Run, index: int, page: Page) -> dict[str, Any]:
    """Values of the template about one run, the one at `index` on the page."""
    anchor = f"run-{index}"
    metrics = results.metrics_of(run)
    estimates = {m.name: results.estimates_of(run, m) for m in metrics}
    verdict, tone = results.NO_VERDICT, "same"
    if metrics:
        verdict, tone = results.verdict(run, metrics[0], estimates[metrics[0].name])
    curves, more_curves = _curves(run, metrics)
    # A page is shared; an absolute path says who trained where.
    named = Named({"run folder": str(run.folder.resolve())} | run.config)
    return {
        "id": anchor,
        "name": run.name,
        "finished": run.finished,
        "status": facts.status(run),
        "problems": [named(text) for text in run.problems],
        "verdict": verdict[:1].upper() + verdict[1:],
        "tone": tone,
        "subject": run.subject,
        "noun": run.noun,
        "remarks": [(tone, named(text)) for tone, text in results.remarks(run, metrics, estimates)],
        "facts": [(label, named(text)) for label, text in facts.facts(run)],
        "before": results.settings(run.base) if run.base else "",
        "after": results.settings(run.after) if run.after else "",
        "after_label": run.after.label if run.after else "tuned",
        "primary": metrics[0] if metrics else None,
        "metrics": metrics,
        "table": [results.table_row(run, m, estimates[m.name]) for m in metrics],
        "guided": any(e["base_best_guidance"].known for e in estimates.values()),
        "intervals": results.method(run, metrics) if any(e["difference"].bounded for e in estimates.values()) else "",
        "searched": any(e["tuned_best_guidance"].known for e in estimates.values()),
        "guidance": results.guidance_search(run, metrics),
        "best_of": best_of.view(run, metrics),
        "strength": strength.view(run, metrics),
        "curves": curves,
        "more_curves": more_curves,
        "num_during": run.during[-1].num_distinct() if run.during else 0,
        "config_text": named(run.config_text),
        "provenance": [(key, named(str(value))) for key, value in leaves(run.provenance).items()],
    } | _images(run, metrics, index, page, num_bytes([curves, more_curves, run.config_text]))


def _images(run: Run, metrics: list[Metric], index: int, page: Page, taken: int) -> dict[str, Any]:
    """The sections with images: pairs, filmstrips, trees, ranking, every prompt; the others take `taken` bytes."""
    anchor, available = f"run-{index}", images.imaged(run)
    gain = np.full(available.shape, np.nan)
    if metrics:
        before, after = results.paired(run, metrics[0].name)
        gain = metrics[0].sign * (after - before)
    film = images.film(run, metrics, page.place)
    own = previews.strip(run, page.place)
    trees = _trees(run, f"{anchor}-tree", page.place)
    drawn = {
        "pair": images.draw_pairs(available) if metrics else [],
        "worst": images.largest_drops(gain, available),
        "best": images.largest_drops(-gain, available),
    }
    room = (PAGE_BYTES - page.taken) // len(page.marks) - taken - num_bytes([film, own, trees])
    cards = collect(run, metrics, [pair for pairs in drawn.values() for pair in pairs], available, room, index, page)
    pairs, worst, best = ([cards.card(pair, f"{anchor}-{kind}") for pair in pairs] for kind, pairs in drawn.items())
    every = cards.every()
    # The permanent place of a prompt's images, or a card further up.
    places = {c["prompt_id"]: c["anchor"] for c in (*best, *worst, *pairs, *every)}
    return {
        "num_imaged": int(available.any(-1).sum()) if available.size else 0,
        "num_pairs": int(np.isfinite(gain).sum()),
        "num_worse": int((gain < 0).sum()),
        "num_better": int((gain > 0).sum()),
        "pairs": pairs,
        "film": film,
        "previews": own,
        "trees": trees,
        "worst": worst,
        "best": best,
        "every": every,
        "edits": any(card["given"] for card in (*pairs, *worst, *best, *every)),
        "embedding": cards.album.described(),
        "video": _video(cards.album),
        "prompts": _prompt_rows(run, metrics, cards, places),
    }


def _video(shown: Album) -> str:
    """What the videos of a page are, and what it holds of them; "": they are images."""
    reels = {path: image for path, image in shown.images.items() if image["reel"]}
    if not reels:
        return ""
    first = next(iter(reels))
    frames, fps = media.facts(first)
    text, kept = f"Videos of {frames} frames, {fps or media.FPS:g} a second", reels[first]["reel"].frames
    if kept < frames:
        text += f"; {kept} of them are shown, over the same time"
    sizes = [len(image["src"]) for image in reels.values() if image["src"].startswith("data:")]
    size = f"; each takes {sum(sizes) / len(sizes) / 1000:.1f} kB" if sizes else ""
    return f"{text}, at most {images.VIDEO_PX} pixels a side{size}. Both sides of a pair play together."


def num_bytes(values: Any) -> int:
    """Characters of all texts in nested values."""
    if isinstance(values, dict):
        return sum(num_bytes(value) for value in values.values())
    if isinstance(values, list | tuple):
        return sum(map(num_bytes, values))
    return len(values) if isinstance(values, str) else 0


def _curves(run: Run, metrics: Sequence[Metric]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(main charts, charts of all other logged numbers)."""
    by_name = {m.name: m for m in metrics}
    # Rows with the same keys, nearly all of them, count once.
    shapes = dict.fromkeys(map(tuple, run.rows))
    keys = list(dict.fromkeys(key for shape in shapes for key in shape if key != "iteration"))
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


def _trees(run: Run, anchor: str, place: Place) -> dict[str, Any] | None:
    """Trees of the base, the latest evaluations during training and the tuned model, with common colours."""
    result = in_order(run.trees, finished=run.finished, latest=DURING_TREES)
    if not result:
        return None
    ranges, drawings = treechart.Ranges.of(result), []
    for tree in result:
        name = f"{anchor}-{tree.tag}"
        sheet = place.image(tree.sheet, images.SHEET_PX, cells=max(tree.columns, tree.rows))
        svg = treechart.draw(tree, ranges, sheet, name)
        drawings.append({"id": name, "of": tree, "caption": treechart.caption(tree), "svg": svg})
    last, key = result[-1], treechart.legend(result, ranges)
    return {"method": last.method.replace("_", " "), "prompt": last.prompt, "legend": key, "drawings": drawings}


def _prompt_rows(run: Run, metrics: Sequence[Metric], cards: Cards, places: dict[int, str]) -> list[dict[str, Any]]:
    """A row for each prompt that base and tuned share: its anchor, means over the seeds, and where its images are."""
    if run.base is None:
        return []
    same = results.shared(run)
    columns = [(metric, *map(nan_mean, results.paired(run, metric.name))) for metric in metrics]
    rows = []
    for p in np.flatnonzero(same.any(-1)) if same.size else ():
        cells = [(metric, before[p], after[p]) for metric, before, after in columns]
        anchor = cards.anchors[int(p)] + cards.mark
        place = places.get(int(p), anchor)
        rows.append(
            {"prompt_id": int(p), "text": run.base.prompts[p], "anchor": anchor, "place": place, "cells": cells}
        )
    return rows
