"""Values of the template's part about several runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from flowrl.apps.gallery import charts, facts, movement
from flowrl.apps.gallery.certainty import LEAST
from flowrl.apps.gallery.compare import curves, drawing, plain
from flowrl.apps.gallery.compare.configurations import differences
from flowrl.apps.gallery.compare.drawing import Style
from flowrl.apps.gallery.compare.scores import Change, Recipe, Standing, recipe, standings
from flowrl.apps.gallery.compare.shared import Shared, SharedMetric, label_of, recipe_of, same_noise, share
from flowrl.apps.gallery.compare.wall import wall
from flowrl.apps.gallery.images import Place
from flowrl.apps.gallery.results import DASH, Estimate, Metric
from flowrl.apps.gallery.runs import Run

WHOLE = 3
"""Most runs whose whole reports are on the page of their comparison; of more, their own pages are linked."""


def comparison(runs: Sequence[Run], place: Place, *, alike: bool) -> dict[str, Any]:
    """Values about several runs; runs that are not `alike` (other contents of a file) are only listed.

    Raises:
        ConfigError: runs that share no prompt, seed or metric.
    """
    recipes = _recipes(runs)
    styles = {i: Style(number) for number, members in enumerate(recipes) for i in members}
    names = _recipe_names(runs, recipes)
    links = [f"#run-{i}" if len(runs) <= WHOLE else place.own_page(run, i) for i, run in enumerate(runs)]
    shared = share(runs) if alike else None
    common = {
        "count": len(runs),
        "links": links,
        "whole": len(runs) <= WHOLE,
        "differences": differences([runs[members[0]] for members in recipes]),
        "recipe_names": names,
    }
    if shared is None:
        return common | {"shared": None, "plain": plain.comparison(runs, alike=alike), "metrics": []}
    moves = {i: movement.of_run_in_words(runs[i]) for i in shared.compared}
    metrics = [_of_metric(shared, of, recipes, styles, moves) for of in shared.metrics]
    places = curves.curve_places(shared)
    subjects = {run.subject.short for run in runs}
    subject = f"{subjects.pop()} " if len(subjects) == 1 else ""
    for of, values in zip(shared.metrics, metrics, strict=True):
        table = values.pop("standings")
        values["curves"], without = curves.over_training(shared, of, styles, subject, places)
        values["costs"], unlogged = curves.over_costs(shared, of, table, styles, subject)
        values["without"], values["unlogged"] = without, unlogged
        drawn = [(name, styles[m[0]]) for name, m in zip(names, recipes, strict=True) if set(m) & set(of.members)]
        values["legend"] = drawing.legend(drawn)
        for row in values["recipes"]:
            row["name"] = next(name for name, members in zip(names, recipes, strict=True) if row["run"] in members)
    first = metrics[0]
    order = [row["run"] for row in first["rows"]]
    order += [i for i in shared.compared if i not in order]
    return common | {
        "shared": shared,
        "num_prompts": len(set(shared.groups.tolist())),
        "noun": "video" if all(runs[i].noun == "video" for i in shared.compared) else "image",
        "num_images": len(shared.places) * len(shared.seeds),
        "num_curve_prompts": len(places),
        "seeds": ", ".join(map(str, shared.seeds)),
        "same_noise": same_noise(shared),
        "tie": f"{shared.tie:g}",
        "older": [label_of(runs, i) for i in shared.compared if shared.same(i) is None],
        "plain": None,
        "metrics": metrics,
        "missing": [_absent(runs, i) for i in range(len(runs)) if i not in shared.compared],
        "left_out": [(label_of(runs, i), shared.left_out[i]) for i in sorted(shared.left_out)],
        "wall": wall(shared, shared.metrics[0], order, place),
    }


def _recipes(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    """Numbers of the runs of each recipe, in the order of the first."""
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault(recipe_of(run), []).append(i)
    return [tuple(members) for members in found.values()]


def _recipe_names(runs: Sequence[Run], recipes: Sequence[tuple[int, ...]]) -> list[str]:
    """The run's name, or the common beginning of the names of its seeds; all names where that is another's too."""
    names = [_recipe_name(runs, members) for members in recipes]
    return [
        name if names.count(name) == 1 else ", ".join(label_of(runs, i) for i in members)
        for name, members in zip(names, recipes, strict=True)
    ]


def _recipe_name(runs: Sequence[Run], members: tuple[int, ...]) -> str:
    """The run's name, or the common beginning of the names of its runs with how many seeds they have."""
    names = [label_of(runs, i) for i in members]
    if len(names) == 1:
        return names[0]
    letters = itertools.takewhile(lambda same: len(set(same)) == 1, zip(*(runs[i].name for i in members), strict=False))
    stem = "".join(letter[0] for letter in letters).rstrip("-_. ")
    stem = stem.removesuffix("seed").rstrip("-_. ") or names[0]
    seeds = len(_one_each(runs, members))
    return f"{stem} ({seeds} seeds)" if seeds > 1 else f"{stem} ({len(members)} runs)"


def _of_metric(
    shared: Shared,
    of: SharedMetric,
    recipes: Sequence[tuple[int, ...]],
    styles: dict[int, Style],
    moves: dict[int, str],
) -> dict[str, Any]:
    """Tables of one metric; `moves` has each run's sentence on how much its images change."""
    table, metric = standings(shared, of), of.metric
    bars = [Estimate(), *(row.over_base.estimate for row in table)]
    domain = _domain(bars)
    rows = [_row(shared, metric, standing, styles, domain) for standing in table]
    for row in rows:
        row["moved"] = moves[row["run"]]
    cells = [row[kind] for row in rows for kind in ("over_base", "over_leader")]
    repeated = [_one_each(shared.runs, [i for i in members if i in of.members]) for members in recipes]
    seeds = [recipe(shared, of, members) for members in repeated if len(members) > 1]
    seeds.sort(key=lambda one: -metric.sign * one.tuned["mean"])
    return {
        "name": metric.name,
        "label": metric.label,
        "lower": metric.sign < 0,
        "passes": metric.percent,
        "standings": table,
        "rows": rows,
        "few": LEAST if any(cell and cell["few"] for cell in cells) else 0,
        "leader": label_of(shared.runs, table[0].run),
        "num_comparisons": 2 * len(table) - 1,
        "recipes": [_seeds(shared.runs, metric, one, styles) for one in seeds],
    }


def _one_each(runs: Sequence[Run], members: Sequence[int]) -> tuple[int, ...]:
    """The first run of each training seed: a seed that was trained twice is no second one."""
    found: dict[str, int] = {}
    for i in members:
        found.setdefault(str(runs[i].config.get("seed")), i)
    return tuple(found.values())


def _row(
    shared: Shared, metric: Metric, standing: Standing, styles: dict[int, Style], domain: tuple[float, float]
) -> dict[str, Any]:
    run, gain = shared.runs[standing.run], standing.over_base.estimate
    win = Metric("win", percent=True, decimals=1)
    judged = run.subject.judged
    return {
        "run": standing.run,
        "name": label_of(shared.runs, standing.run),
        "swatch": styles[standing.run].color,
        "algorithm": str(facts.value_at(run.config, "algorithm", "name") or DASH),
        "status": facts.status(run),
        "on": run.subject.on.strip(),
        "base": _level(metric, standing.base),
        "tuned": _level(metric, standing.tuned),
        "over_base": _change(metric, standing.over_base, judged),
        "over_leader": _change(metric, standing.over_leader, judged),
        "win": _level(win, standing.win),
        "plot": charts.interval_plot([("difference", gain.mean, gain.low, gain.high)], domain=domain, zero=True),
        "time": facts.duration(facts.seconds(run)),
        "cpu": _time(curves.cpu_seconds(run)),
    }


def _seeds(runs: Sequence[Run], metric: Metric, one: Recipe, styles: dict[int, Style]) -> dict[str, Any]:
    """A row of the table of recipes."""

    def bounds(found: dict[str, float], kind: str) -> str:
        return _interval(metric, Estimate(found["mean"], found[f"low{kind}"], found[f"high{kind}"]))

    gain = one.gain
    sure = math.isfinite(gain["low"]) and metric.tone(gain["low"], gain["high"])
    return {
        "run": one.runs[0],
        "swatch": styles[one.runs[0]].color,
        "seeds": ", ".join(str(runs[i].config.get("seed", DASH)) for i in one.runs),
        "tuned": {"text": metric.value(one.tuned["mean"]), "interval": bounds(one.tuned, "")},
        "sd": metric.value(one.tuned["sd"], unit="", digits=metric.decimals + 1),
        "gain": {"text": metric.change(gain["mean"]), "interval": bounds(gain, "")},
        "gain_sd": metric.value(gain["sd"], unit="", digits=metric.decimals + 1),
        "over_seeds": bounds(gain, "_seeds"),
        "over_prompts": bounds(gain, "_prompts"),
        "tone": sure or "same",
    }


def _absent(runs: Sequence[Run], number: int) -> dict[str, str]:
    run = runs[number]
    algorithm = str(facts.value_at(run.config, "algorithm", "name") or DASH)
    return {"run": str(number), "name": label_of(runs, number), "algorithm": algorithm, "status": facts.status(run)}


def _level(metric: Metric, e: Estimate) -> dict[str, str]:
    return {"text": metric.value(e.mean), "interval": _interval(metric, e)}


def _interval(metric: Metric, e: Estimate) -> str:
    return f"{metric.value(e.low, unit='')} to {metric.value(e.high, unit='')}" if e.bounded else ""


def _change(metric: Metric, change: Change | None, judged: bool) -> dict[str, Any] | None:
    """Cell of a paired difference; None: this run is the leader."""
    if change is None:
        return None
    e = change.estimate
    tone = metric.tone(e.low, e.high) if e.bounded and judged else "same"
    return {
        "text": metric.change(e.mean),
        "interval": _interval(metric, e),
        "tone": tone,
        "sure": change.sure and judged,
        "few": f"{change.told[0]} of {change.told[1]} prompts differ" if change.told[0] < LEAST else "",
        "p": "p < 0.001" if change.p < 0.001 else f"p = {change.p:.3f}",
    }


def _domain(bars: Sequence[Estimate]) -> tuple[float, float]:
    """One axis for all intervals, with 0, so that they can be compared."""
    ends = [v for e in bars for v in (e.mean, e.low, e.high) if math.isfinite(v)]
    return min([0.0, *ends]), max([0.0, *ends])


def _time(seconds: float) -> str:
    return facts.duration(seconds) if math.isfinite(seconds) else DASH
