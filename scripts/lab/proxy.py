"""Proxy against gold: training on tiny-clip alone, with KL, with GRPO-Guard, with a second reward, and the verifier.

    python -m scripts.lab proxy                             run missing cells, then write picture and page
    python -m scripts.lab proxy --write                     only write picture and page
    python -m scripts.lab proxy NAME ... --seeds 0          only these recipes and seeds
    python -m scripts.lab proxy --again NAME ... --seeds 0  run them anew

docs/rewards.md, which shows the picture, is written with the page.

A cell is one recipe of configs/proxy and one seed, kept in docs/rewards/proxy.json as the lab keeps its own, with its
curve: every evaluation of the run, on the same held-out captions and seeds. As the lab, it can be stopped at any time,
and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scripts.lab import runs
from scripts.lab.cells import Cells, Job, load, run_missing
from scripts.lab.page import commit_name, cpu_seconds, row, table
from scripts.lab.recipes import ROOT, read_recipe
from scripts.lab.videos import SEEDS
from scripts.pages.generated import make

RECIPES = ROOT / "configs" / "proxy"
PAGES = ROOT / "docs" / "rewards"
NUMBERS, IMAGE, PAGE = PAGES / "proxy.json", PAGES / "proxy.svg", PAGES / "proxy.md"
PRETRAINING = ROOT / "assets" / "tiny-clip" / "pretraining.json"
PROXY, GOLD = "clip_cos", "shapes_strict"
METRICS = (PROXY, GOLD, "shapes_partial")
COLORS = {"flow_grpo": "#d1495b", "flow_grpo_kl": "#2e6f95", "grpo_guard": "#7a9e3f", "multi_reward": "#b07aa1"}


def recipes() -> dict[str, Path]:
    """Name -> file, in the order of the page."""
    return {name: RECIPES / f"{name}.yaml" for name in COLORS}


# ---- running


def run_cell(name: str, seed: int) -> dict[str, Any]:
    """Train one cell as the lab does, in the run folder proxy-NAME-seedN."""
    recipe = recipes()[name]
    run = runs.cell_run(f"proxy-{name}", recipe, seed)
    captions = read_recipe(recipe)["eval"]["periodic_prompts"]
    return runs.run_cell(run) | {"curve": runs.mean_scores(runs.RUNS / run.name, captions, METRICS)}


def jobs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """The cells for `run_missing`, one seed of all recipes after the other."""
    for seed in seeds:
        for name in names:
            yield f"{name}/{seed}", partial(run_cell, name, seed)


# ---- the picture


def mean_curve(curves: list[list[dict[str, float]]]) -> dict[str, np.ndarray]:
    """Mean over seeds by iteration; all curves must have been evaluated at the same iterations."""
    iterations = [[point["iteration"] for point in rows] for rows in curves]
    if any(other != iterations[0] for other in iterations):
        raise ValueError(
            f"cells of one recipe were evaluated at other iterations: {iterations}; run the older ones --again"
        )
    means = {name: np.mean([[point[name] for point in rows] for rows in curves], axis=0) for name in METRICS}
    return {"iteration": np.asarray(iterations[0])} | means


def by_recipe(cells: Cells) -> dict[str, list[dict[str, Any]]]:
    """Recipe -> its cells in the order of seeds; recipes without any are left out."""
    result = {name: [cells[key] for seed in SEEDS if (key := f"{name}/{seed}") in cells] for name in recipes()}
    return {name: rows for name, rows in result.items() if rows}


def draw(cells: Cells, file: Path) -> None:
    """Proxy and verifier against iterations: a thin line a seed, a thick one their mean."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "proxy_against_gold", "font.size": 9}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {PROXY: "proxy: clip_cos of tiny-clip", GOLD: "gold: shapes_strict"}
    for panel, (metric, title) in zip(panels, titles.items(), strict=True):
        for name, members in by_recipe(cells).items():
            curves = [cell["curve"] for cell in members]
            for rows in curves:
                at = [point["iteration"] for point in rows]
                panel.plot(at, [point[metric] for point in rows], color=COLORS[name], linewidth=0.7, alpha=0.4)
            mean = mean_curve(curves)
            panel.plot(mean["iteration"], mean[metric], color=COLORS[name], linewidth=2, label=name)
        panel.set(xlabel="iteration", title=title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS), fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


# ---- the page


def _interval(value: dict[str, float]) -> str:
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def summary_table(cells: Cells) -> list[str]:
    """A row per recipe: both scores before, the verifier at its best and at the end, and what that cost."""
    lines = table(
        *("recipe", "seeds", "proxy, base -> end", "strict, base", "strict, best mean (at iteration)", "strict, end"),
        *("end - best", "tuned - base on all captions, lowest lower end"),
    )
    result = by_recipe(cells)
    for name in recipes():
        if name not in result:
            lines.append(row(name, f"0 of {len(SEEDS)}", *[""] * 5, "not run"))
            continue
        members = result[name]
        mean = mean_curve([cell["curve"] for cell in members])
        gold, best = 100 * mean[GOLD], int(np.argmax(mean[GOLD]))
        gains = [cell["summary"]["difference"][GOLD] for cell in members]
        gain = 100 * sum(value["mean"] for value in gains) / len(gains)
        lines.append(
            row(
                name,
                f"{len(members)} of {len(SEEDS)}",
                f"{mean[PROXY][0]:.3f} -> {mean[PROXY][-1]:.3f}",
                f"{gold[0]:.1f}",
                f"{gold[best]:.1f} ({mean['iteration'][best]})",
                f"{gold[-1]:.1f}",
                f"{gold[-1] - gold[best]:+.1f}",
                f"{gain:+.1f}, {100 * min(value['low'] for value in gains):+.1f}",
            )
        )
    return lines


def in_short(cells: Cells) -> list[str]:
    """The recipe whose verifier falls furthest from its best mean to the end, and the one where it falls least."""
    lines = [f"{len(cells)} of {len(recipes()) * len(SEEDS)} cells have been run."]
    falls: list[tuple[float, str]] = []
    for name, members in by_recipe(cells).items():
        mean = mean_curve([cell["curve"] for cell in members])
        gold, best = 100 * mean[GOLD], int(np.argmax(mean[GOLD]))
        text = (
            f"With `{name}` ({len(members)} of {len(SEEDS)} seeds) the proxy goes from {mean[PROXY][0]:.3f} to "
            f"{mean[PROXY][-1]:.3f} in {mean['iteration'][-1]} iterations; of the images, {gold[0]:.1f} % pass the "
            f"verifier before, {gold[best]:.1f} % at the best evaluation (iteration {mean['iteration'][best]}) and "
            f"{gold[-1]:.1f} % at the end."
        )
        falls.append((float(gold[-1] - gold[best]), text))
    lines += list(dict.fromkeys(text for _, text in (min(falls), max(falls)))) if falls else []
    return [*lines, "The best of several noisy means is a little too high."] if falls else lines


def cells_table(cells: Cells) -> list[str]:
    """A row per cell."""
    lines = table("recipe", "seed", "proxy, tuned - base", "strict, tuned - base", "CPU seconds", "commit")
    for name in recipes():
        for seed in SEEDS:
            cell = cells.get(f"{name}/{seed}")
            if cell is None:
                continue
            gain = cell["summary"]["difference"]
            shown = (_interval(gain[PROXY]), _interval(gain[GOLD]), cpu_seconds([cell["summary"]]))
            lines.append(row(name, seed, *shown, commit_name(cell["commit"])))
    return lines


def proxy_tables(facts: dict[str, Any]) -> list[str]:
    """What pretraining.json says: agreement on base samples, and the ascent on the pixels."""
    lines = table("samples of tiny-sd3", "strict", "clip_cos", "AUC of strict", "Spearman, strict", "Spearman, partial")
    for part, values in facts["base samples of tiny-sd3"].items():
        within, mean = values["within groups"], values["mean"]
        shown = [
            _interval(within[f"{key}"]) for key in ("auc of strict", "spearman with strict", "spearman with partial")
        ]
        lines.append(row(f"{part} captions", f"{100 * mean[GOLD]:.1f} %", f"{mean[PROXY]:.3f}", *shown))
    lines += ["", ASCENT]
    lines += table("start", "steps", "clip_cos", "strict", "partial")
    for start, rows in facts["gradient ascent on the pixels"].items():
        for point in rows:
            lines.append(row(start, point["steps"], *(f"{point[name]:.3f}" for name in METRICS)))
    return lines


HEAD = """\
# Proxy against gold

Written by `python -m scripts.lab proxy`; do not edit. A learned reward approximates the goal. In
the shapes world the goal itself can be checked, so the two can be compared: training is on `assets/tiny-clip`
(`clip_score`, the cosine), while `shapes_strict` is only evaluated.

## In short
"""
PRETRAINED = """\

## The proxy

An open_clip model of 1.4 M parameters, trained contrastively on rendered images and captions, none of the held-out
scenes among them: `python -m scripts.pretraining tiny-clip` (seed 0, about a minute of one core).
`python -m scripts.pretraining tiny-clip --measure` measures it, on 16 samples a caption of tiny-sd3 as it is shipped
(six steps, no CFG, 128 captions of each split): means over captions of the values in a group of 16, with 95 % bootstrap
intervals. AUC is the chance that a right sample scores above a wrong one of the same caption.
"""
ASCENT = """\
It can be fooled. Adam on the pixels, up the cosine (rate 0.03, pixels kept in [0, 1], 64 held-out captions), by the
same command:
"""
TRAINING = """\

## Training on it

Recipes: `configs/proxy`. Means over seeds 0 to 2 on the first 128 held-out captions x 2 fixed seeds, every 25
iterations, averaged weights. The best of several noisy means is a little too high, so a small fall after it means
little. The last column is on all 512 captions x 2, with 95 % bootstrap intervals over captions.
"""


def page(cells: Cells, facts: dict[str, Any]) -> str:
    lines = [HEAD, *in_short(cells), PRETRAINED, *proxy_tables(facts), TRAINING]
    if cells:
        lines += [f"![proxy and strict verifier against iterations]({IMAGE.name})", ""]
    lines += summary_table(cells)
    if cells:
        lines += ["", "Every cell:", "", *cells_table(cells)]
    return "\n".join(lines) + "\n"


def arguments(text: str | None, recipes: Collection[str]) -> argparse.Namespace:
    """The words of a study of some recipes, `text` in front: names, seeds, write or again."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS), help="default: all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="only write picture and page")
    what.add_argument("--again", action="store_true", help="run the named recipes anew")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(recipes))
    if unknown:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(recipes)}")
    if args.again and not args.names:
        parser.error("--again wants the names of recipes")
    return args


def main() -> int:
    args = arguments(__doc__, recipes())
    good = args.write or run_missing(jobs(args.names or list(recipes()), args.seeds), NUMBERS, again=args.again)
    cells = load(NUMBERS)
    PAGES.mkdir(parents=True, exist_ok=True)
    if cells:
        draw(cells, IMAGE)
    PAGE.write_text(page(cells, json.loads(PRETRAINING.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PAGE)
    make(["rewards"])
    return 0 if good else 1
