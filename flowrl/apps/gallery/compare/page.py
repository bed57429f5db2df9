"""Values of the template's part about several runs."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flowrl.apps.gallery import charts, facts, movement, results
from flowrl.apps.gallery.certainty import LEAST
from flowrl.apps.gallery.charts import Style
from flowrl.apps.gallery.compare import curves
from flowrl.apps.gallery.compare.configurations import differences, recipe_of
from flowrl.apps.gallery.compare.scores import Recipe, Standing, recipe, standings
from flowrl.apps.gallery.compare.shared import Shared, SharedMetric, label_of, same_noise, share
from flowrl.apps.gallery.compare.wall import wall
from flowrl.apps.gallery.images import Place
from flowrl.apps.gallery.results import DASH, Estimate, Metric
from flowrl.apps.gallery.runs import Run, value_at
from flowrl.display.units import duration

WHOLE = 3
"""Most runs whose whole reports are on the page of their comparison; of more, their own pages are linked."""


def comparison(runs: Sequence[Run], place: Place, *, alike: bool) -> dict[str, Any]:
    """Values about several runs; runs that are not `alike` (other contents of a file) are only listed.

    Raises ConfigError: runs that share no prompt, seed or metric.
    """
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        found.setdefault(recipe_of(run), []).append(i)
    recipes = [tuple(members) for members in found.values()]
    styles = {i: Style(number) for number, members in enumerate(recipes) for i in members}
    own = [_recipe_name(runs, members) for members in recipes]
    names = [
        name if own.count(name) == 1 else ", ".join(label_of(runs, i) for i in members)
        for name, members in zip(own, recipes, strict=True)
    ]
    links = [f"#run-{i}" if len(runs) <= WHOLE else place.own_page(run, i) for i, run in enumerate(runs)]
    shared = share(runs) if alike else None
    subjects = {run.subject.short for run in runs}
    subject = f"{subjects.pop()} " if len(subjects) == 1 else ""
    common = {
        "count": len(runs),
        "links": links,
        "whole": len(runs) <= WHOLE,
        "differences": differences([runs[members[0]] for members in recipes]),
        "recipe_names": names,
    }
    if shared is None:
        return common | {"shared": None, "plain": _plain(runs, subject, alike=alike), "metrics": []}
    moves = {i: movement.of_run_in_words(runs[i]) for i in shared.compared}
    metrics = [_of_metric(shared, of, recipes, styles, moves) for of in shared.metrics]
    places = curves.curve_places(shared)
    for of, values in zip(shared.metrics, metrics, strict=True):
        table = values.pop("standings")
        values["curves"], without = curves.over_training(shared, of, styles, subject, places)
        values["costs"], unlogged = curves.over_costs(shared, of, table, styles, subject)
        values["without"], values["unlogged"] = without, unlogged
        drawn = [(name, styles[m[0]]) for name, m in zip(names, recipes, strict=True) if set(m) & set(of.members)]
        values["legend"] = charts.legend(drawn)
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
        "plain": None,
        "metrics": metrics,
        "missing": [_head(runs, i) for i in range(len(runs)) if i not in shared.compared],
        "left_out": [(label_of(runs, i), shared.left_out[i]) for i in sorted(shared.left_out)],
        "wall": wall(shared, shared.metrics[0], order, place),
    }


def _plain(runs: Sequence[Run], subject: str, *, alike: bool) -> dict[str, Any]:
    """Table of several runs, each by its primary metric, and a chart of their evaluations if they are `alike`."""
    rows, drawn = [], []
    for number, run in enumerate(runs):
        row = _head(runs, number) | {"result": None, "change": Estimate()}
        rows.append(row)
        for metric in results.metrics_of(run)[:1]:
            estimates = results.estimates_of(run, metric)
            row |= {"result": results.table_row(run, metric, estimates), "change": estimates["difference"]}
            named = f"{row['name']}{run.subject.on}"
            drawn.append((metric, charts.Series(named, *results.evaluated_curve(run, metric), markers=True)))
    # Different metrics have no common unit, and no common axis.
    same_metric = alike and len({metric.name for metric, _ in drawn}) == 1
    domain = _domain([row["change"] for row in rows])
    for row in rows:
        row["plot"] = _bar(row["change"] if same_metric else Estimate(), domain)
    curve = charts.line_chart([s for _, s in drawn], percent=drawn[0][0].percent) if same_metric else ""
    return {"rows": rows, "curve": curve, "title": f"{subject}{drawn[0][0].label} over training" if same_metric else ""}


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
    changes = [change for row in table for change in (row.over_base, row.over_leader) if change is not None]
    domain = _domain([row.over_base.estimate for row in table])
    rows = [_row(shared, standing, styles, domain) | {"moved": moves[standing.run]} for standing in table]
    repeated = [_one_each(shared.runs, [i for i in members if i in of.members]) for members in recipes]
    seeds = [recipe(shared, of, members) for members in repeated if len(members) > 1]
    seeds.sort(key=lambda one: -metric.sign * one.tuned["mean"])
    return {
        "of": metric,
        "standings": table,
        "rows": rows,
        "searched": any(standing.at_best.known for standing in table),
        "least": LEAST,
        "few": LEAST if any(change.told[0] < LEAST for change in changes) else 0,
        "num_comparisons": 2 * len(table) - 1,
        "recipes": [_seeds(shared.runs, metric, one, styles) for one in seeds],
    }


def _one_each(runs: Sequence[Run], members: Sequence[int]) -> tuple[int, ...]:
    """The first run of each training seed: a seed that was trained twice is no second one."""
    found: dict[str, int] = {}
    for i in members:
        found.setdefault(str(runs[i].config.get("seed")), i)
    return tuple(found.values())


def _row(shared: Shared, standing: Standing, styles: dict[int, Style], domain: tuple[float, float]) -> dict[str, Any]:
    """A row of the table of leaders."""
    run = shared.runs[standing.run]
    cpu = curves.cpu_seconds(run)
    return _head(shared.runs, standing.run) | {
        "swatch": styles[standing.run].color,
        "standing": standing,
        "judged": run.subject.judged,
        "win": Metric("win", percent=True, decimals=1).level(standing.win),
        "plot": _bar(standing.over_base.estimate, domain),
        "cpu": duration(cpu) if math.isfinite(cpu) else DASH,
    }


def _seeds(runs: Sequence[Run], metric: Metric, one: Recipe, styles: dict[int, Style]) -> dict[str, Any]:
    """A row of the table of recipes."""

    def bounds(found: dict[str, float], kind: str) -> str:
        return metric.interval(Estimate(found["mean"], found[f"low{kind}"], found[f"high{kind}"]))

    gain = one.gain
    return {
        "run": one.runs[0],
        "swatch": styles[one.runs[0]].color,
        "seeds": ", ".join(str(runs[i].config.get("seed", DASH)) for i in one.runs),
        "tuned": metric.level(Estimate.of(one.tuned)),
        "sd": metric.value(one.tuned["sd"], unit="", digits=metric.decimals + 1),
        "gain": {"text": metric.change(gain["mean"]), "interval": bounds(gain, "")},
        "gain_sd": metric.value(gain["sd"], unit="", digits=metric.decimals + 1),
        "over_seeds": bounds(gain, "_seeds"),
        "over_prompts": bounds(gain, "_prompts"),
        "tone": metric.sure_tone(Estimate.of(gain)),
    }


def _head(runs: Sequence[Run], number: int) -> dict[str, Any]:
    """Cells of any table about a run."""
    run = runs[number]
    return {
        "run": number,
        "name": label_of(runs, number),
        "algorithm": str(value_at(run.config, "algorithm", "name") or DASH),
        "status": facts.status(run),
        "on": run.subject.on.strip(),
        "time": duration(facts.seconds(run)),
    }


def _domain(bars: Sequence[Estimate]) -> tuple[float, float]:
    """One axis for all intervals, with 0, so that they can be compared."""
    ends = [v for e in bars for v in (e.mean, e.low, e.high) if math.isfinite(v)]
    return min([0.0, *ends]), max([0.0, *ends])


def _bar(e: Estimate, domain: tuple[float, float]) -> Markup:
    return charts.interval_plot([("difference", e.mean, e.low, e.high)], domain=domain, zero=True)
