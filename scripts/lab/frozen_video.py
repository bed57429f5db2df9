"""The frozen video: a run rewarded by smoothness alone beside one rewarded by `motion`, whose gate asks for movement.

    python -m scripts.lab frozen-video            run missing cells, then write the page and its pictures
    python -m scripts.lab frozen-video --again    run both anew
    python -m scripts.lab frozen-video --write    only write them; the filmstrips need the run folders

A cell is one of the two recipes on seed 0, kept in docs/rewards/frozen_video.json as the lab keeps its own, with its
curve. As the lab, it can be stopped at any time, and the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl.evaluation.results import Evaluation
from scripts.lab import cells, runs
from scripts.lab.page import commit_name, cpu_seconds, row, table
from scripts.lab.recipes import ROOT, read_recipe
from scripts.pages.strips import drawn, strips
from scripts.pages.svg import Panel, Picture

RECIPES = ROOT / "configs" / "frozen"
PAGES = ROOT / "docs" / "rewards"
NUMBERS, PAGE = PAGES / "frozen_video.json", PAGES / "frozen_video.md"
CURVES, STRIPS = PAGES / "frozen_video.svg", PAGES / "frozen_video.png"
NAMES = {"smooth": "smoothness alone", "gated": "motion, with its gate"}
"""Name of a recipe -> what it is rewarded by."""
METRICS = {
    "motion_smoothness": "smoothness",
    "motion_dynamics": "dynamics",
    "shapes_motion_strict": "strict",
    "shapes_motion_flicker": "flicker",
}
SHOWN = 3
"""Captions of the filmstrips."""
HEAD = """\
# The frozen video

Written by `python -m scripts.lab frozen-video`; do not edit. Every measure of smoothness is at its best for a video in
which nothing moves, so a model that is rewarded by one alone is asked to stand still. Does it? `assets/tiny-wan`,
{iterations} iterations of Flow-GRPO, seed 0, twice: rewarded by `motion_smoothness` alone
(`configs/frozen/smooth.yaml`), and by `motion` (`configs/frozen/gated.yaml`), which pays for smoothness only as far as
something moves. Nothing else differs, and the verifier (`shapes_motion`) is only looked at.

![nine frames of base and both tuned models on the same captions and noise](frozen_video.png)

Nine frames of {shown} held-out captions, drawn with a fixed seed before any was looked at; all rows of a caption begin
with the same noise.

![smoothness, dynamics and strict accuracy against iterations](frozen_video.svg)

Curves are of the first {captions} held-out captions, the table of all {all}; paired differences with 95 % bootstrap
intervals over captions.
"""
TAIL = """\
Smoothness alone ends in videos of nothing but the background: no object is left that could move. With the gate they go
on moving. But it is a proxy too: objects become larger, crosses become blobs, and the strict accuracy, which nobody
rewards here, changes by {strict:+.1f} points. The gate stops the freezing, not the over-optimisation.

**What to do.** Look at videos, not at the reward alone. Use `motion` beside a reward that reads the caption, and let
[the guard](../watching/guard.md) watch one that is not trained on.
"""


def recipes() -> dict[str, Path]:
    """Name -> file, in the order of the page."""
    return {name: RECIPES / f"{name}.yaml" for name in NAMES}


# ---- running


def run_cell(name: str, recipe: Path) -> dict[str, Any]:
    """Train one of the two as the lab does, in the folder frozen-NAME-seed0."""
    run = runs.cell_run(f"frozen-{name}", recipe, 0)
    captions = read_recipe(recipe)["eval"]["periodic_prompts"]
    return runs.run_cell(run) | {"curve": runs.mean_scores(runs.RUNS / run.name, captions, list(METRICS))}


def jobs() -> Iterator[cells.Job]:
    """The cells for `cells.run_missing`."""
    for name, recipe in recipes().items():
        yield f"{name}/0", partial(run_cell, name, recipe)


# ---- the pictures


def draw_curves(kept: cells.Cells) -> str:
    """Three panels side by side, a line for each run."""
    picture = Picture(190, "smoothness, dynamics and strict accuracy against iterations", width=720)
    colors = dict(zip(NAMES, "ab", strict=True))
    for place, metric in enumerate(list(METRICS)[:3]):
        curves = {name: kept[f"{name}/0"]["curve"] for name in NAMES}
        values = [point[metric] for points in curves.values() for point in points]
        low, high = np.floor(min(values) * 10) / 10, np.ceil(max(values) * 10) / 10
        last = max(points[-1]["iteration"] for points in curves.values())
        left = 44 + 230 * place
        panel = Panel(picture, ((left, 36), (left + 170, 136)), (0, last), (float(low), float(high)))
        panel.axes([0, last // 2, last], [round(float(v), 3) for v in np.linspace(low, high, 3)])
        picture.text(left, 22, METRICS[metric], "small head")
        for name, points in curves.items():
            panel.draw([p["iteration"] for p in points], [p[metric] for p in points], colors[name])
    picture.legend(178, [(colors[name], f"rewarded by {text}") for name, text in NAMES.items()])
    return picture.svg()


def draw_strips(folders: dict[str, Path]) -> Image.Image:
    """Base and both tuned models below each other, for a few captions."""
    rows = {"base": folders["smooth"] / "eval" / "base"}
    rows |= {text: folders[name] / "eval" / "tuned" for name, text in NAMES.items()}
    prompts = Evaluation.load(folders["smooth"] / "eval" / "base.json").prompts
    return strips(rows, {number: prompts[number] for number in drawn(len(prompts), SHOWN)})


# ---- the page


def change(value: dict[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def page(kept: cells.Cells) -> str:
    """The whole page."""
    first = kept["smooth/0"]
    recipe = read_recipe(recipes()["smooth"])
    facts = {
        "iterations": first["summary"]["iterations"],
        "shown": SHOWN,
        "captions": recipe["eval"]["periodic_prompts"],
    }
    lines = [HEAD.format(**facts, all=first["summary"]["base"]["shapes_motion_strict"]["n"])]
    lines += table("output", "base", *(f"rewarded by {text}" for text in NAMES.values()))
    for metric in METRICS:
        base = first["summary"]["base"][metric]["mean"]
        changes = [change(kept[f"{name}/0"]["summary"]["difference"][metric]) for name in NAMES]
        lines.append(row(f"`{metric}`", f"{base:.3f}", *changes))
    strict = 100 * kept["gated/0"]["summary"]["difference"]["shapes_motion_strict"]["mean"]
    lines += ["", TAIL.format(strict=strict), *table("recipe", "CPU seconds", "commit")]
    for name in NAMES:
        cell = kept[f"{name}/0"]
        lines.append(row(name, cpu_seconds([cell["summary"]]), commit_name(cell["commit"])))
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Page and pictures, once both cells are there."""
    kept = cells.load(NUMBERS)
    if missing := [name for name in NAMES if f"{name}/0" not in kept]:
        raise SystemExit(f"not run yet: {', '.join(missing)}")
    PAGE.write_text(page(kept), encoding="utf-8")
    CURVES.write_text(draw_curves(kept), encoding="utf-8")
    folders = {name: runs.RUNS / f"frozen-{name}-seed0" for name in NAMES}
    if all((folder / "eval" / "tuned.json").is_file() for folder in folders.values()):
        draw_strips(folders).save(STRIPS, optimize=True)
    print(PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--again", action="store_true", help="run both cells anew")
    what.add_argument("--write", action="store_true", help="only write the page")
    args = parser.parse_args()
    good = args.write or cells.run_missing(jobs(), NUMBERS, again=args.again)
    if good:
        write_page()
    return 0 if good else 1
