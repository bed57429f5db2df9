"""Long runs: a recipe with several times its iterations. Does its gain hold?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import interval
from scripts.lab.page import METRIC, commit_name, cpu_seconds, percent, row, table
from scripts.lab.recipes import read_recipe
from scripts.lab.runs import Failed, Run, costs, curve, measured, on_the_way, origin, read, train

LONG = (
    *("flow_grpo", "flow_grpo-lora", "grpo_guard", "sage_grpo", "branch_grpo", "flow_dppo"),
    *("awm", "diffusion_nft", "fpo", "ram", "ddpo", "sd-flow_grpo"),
)
FACTOR = 4
EVALUATED = 5
"""Evaluations in as many iterations as the recipe has."""
CAPTIONS = 256
WINDOW = 3
"""Neighbouring evaluations whose mean counts: the best of twenty single ones would be mostly luck."""
TEXT = f"""\
Seed 0 of a recipe with {FACTOR} times its iterations and nothing else changed, `python -m scripts.lab --long`. A
learning rate that falls linearly does so over all of them: where the recipe itself would end, three quarters of it are
left. The curve has {EVALUATED} evaluations in as many iterations as the recipe has, on the first {CAPTIONS} held-out
captions x 2 seeds; gains are points of strict accuracy over the base's on the captions of their column. *Best* is the
best mean of {WINDOW} neighbouring evaluations, at the iteration of the middle one. *Fall* is the mean of the last
{WINDOW} minus that of the best {WINDOW}, paired by caption with a 95 % bootstrap interval; the best are chosen on one
half of the captions and compared on the other, both ways, so that the luck of the choice is not in it. A recipe *falls*
where the whole interval is below 0, and *holds* otherwise. In the figure the dot is the recipe's own cell.
"""


# ---- running


def long_run(name: str, recipe: Path) -> Run:
    own = read_recipe(recipe)["iterations"]
    every = max(1, own // EVALUATED)
    words = (f"iterations={FACTOR * own}", f"eval.every={every}", f"eval.periodic_prompts={CAPTIONS}")
    return Run(f"{name}-long", recipe, 0, words)


def run_long(name: str, recipe: Path) -> dict[str, Any]:
    """The cell of a long run; one that diverged has an end too.

    Raises:
        Failed: it did not finish and did not diverge.
    """
    folder, code = train(long_run(name, recipe))
    status = read(folder / "summary.json")["status"]
    if code and status != "diverged":
        raise Failed(f"it ended with code {code}; {folder / 'train.log'} says why")
    summary = measured(folder) | costs(folder) | {"curve": curve(folder, CAPTIONS)}
    own = {"status": status, "iterations of the recipe": read_recipe(recipe)["iterations"]}
    return origin(folder) | own | {"summary": summary, "fall": fall(on_the_way(folder, CAPTIONS)[1:])}


def fall(way: Sequence[Evaluation]) -> dict[str, float] | None:
    """Last minus best mean of neighbouring evaluations, with its interval over captions; None: too few evaluations.

    Captions of an even number are compared at the place that is best for those of an odd one, and the other way round.
    """
    if len(way) <= WINDOW:
        return None
    means, groups = np.stack([np.nanmean(each.scores[METRIC], axis=1) for each in way]), way[0].groups
    smooth = np.stack([means[k : k + WINDOW].mean(axis=0) for k in range(len(means) - WINDOW + 1)])
    result = np.empty(len(groups))
    for half in (0, 1):
        here = groups % 2 == half
        best = int(smooth[:, ~here].mean(axis=1).argmax())
        result[here] = smooth[-1, here] - smooth[best, here]
    return interval(result, groups)


# ---- the page


def gains(cell: dict[str, Any]) -> list[tuple[int, float]]:
    """(iteration, gain in points) along the curve, from (0, 0)."""
    points = cell["summary"]["curve"]
    return [(point["iteration"], 100 * (point[METRIC] - points[0][METRIC])) for point in points]


def best(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """(iteration of the middle one, mean gain) of the best neighbouring evaluations.

    >>> best([(0, 0.0), (10, 3.0), (20, 6.0), (30, 9.0), (40, 0.0)])
    (20, 6.0)
    """
    way = points[1:]
    size = min(WINDOW, len(way))
    means = [sum(gain for _, gain in way[k : k + size]) / size for k in range(len(way) - size + 1)]
    place = means.index(max(means))
    return way[place + size // 2][0], means[place]


def verdict(cell: dict[str, Any]) -> str:
    if cell["status"] == "diverged":
        return f"diverged at {cell['summary']['iterations'] + 1}"
    if cell["fall"] is None:
        return "too few evaluations"
    return "falls" if cell["fall"]["high"] < 0 else "holds"


def _at(points: Sequence[tuple[int, float]], iteration: int) -> str:
    """The gain at the first evaluation from an iteration on; "-" where the run had ended."""
    return next((f"{gain:+.1f}" for place, gain in points if place >= iteration), "-")


def long_row(name: str, cell: dict[str, Any], short: dict[str, Any] | None) -> str:
    points, own, summary = gains(cell), cell["iterations of the recipe"], cell["summary"]
    place, most = best(points)
    return row(
        name,
        f"{own}; {FACTOR * own}",
        "not run" if short is None else percent(short["summary"]["difference"][METRIC], "+"),
        *(_at(points, factor * own) for factor in (1, 2, FACTOR)),
        percent(summary["difference"][METRIC], "+") if "difference" in summary else "-",
        f"{most:+.1f} ({place})",
        "-" if cell["fall"] is None else percent(cell["fall"], "+"),
        verdict(cell),
        cpu_seconds([summary]),
        commit_name(cell["commit"]),
    )


def long_section(long: dict[str, dict[str, Any]], results: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Lines on the long runs; `keys` are those of `long`, in the order of the page."""
    lines = ["", "## Long runs", "", TEXT]
    if not keys:
        return [*lines, "None has been run."]
    lines += ["![gains of the long runs](lab/long.svg)", ""]
    lines += table(
        *("recipe", "iterations; of the long run", "the recipe's cell", "curve at 1x", "2x", f"{FACTOR}x"),
        *("end, all captions", "best (iteration)", "fall", "verdict", "CPU seconds", "commit"),
    )
    return lines + [long_row(key.split("/")[0], long[key], results.get(key)) for key in keys]


def draw(long: dict[str, dict[str, Any]], results: dict[str, Any], keys: Sequence[str], file: Path) -> None:
    """Gain against iterations, a panel a recipe; the dot is the recipe's own cell with its interval."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "lab", "font.size": 8}
    from matplotlib import pyplot

    columns = min(4, len(keys))
    shape = -(-len(keys) // columns), columns
    size = (2.4 * shape[1], 1.7 * shape[0])
    figure, panels = pyplot.subplots(
        *shape, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(keys) :]:
        panel.set_axis_off()
    for panel, key in zip(panels.flat, keys, strict=False):
        cell, short = long[key], results.get(key)
        own, points = cell["iterations of the recipe"], gains(cell)
        panel.axhline(0, color="#999999", linewidth=0.6)
        panel.plot([place / own for place, _ in points], [gain for _, gain in points], color="#2e6f95", linewidth=1.2)
        if short is not None:
            value = {name: 100 * x for name, x in short["summary"]["difference"][METRIC].items()}
            error = [[value["mean"] - value["low"]], [value["high"] - value["mean"]]]
            panel.errorbar([1], [value["mean"]], yerr=error, fmt="o", color="#d1495b", markersize=3, linewidth=1)
        panel.set_title(key.split("/")[0], fontsize=8)
        panel.set(xlim=(0, FACTOR), xticks=range(FACTOR + 1))
    figure.supxlabel("iterations, in those of the recipe", fontsize=8)
    figure.supylabel("gain, points", fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
