"""Reward gradients against policy gradients, on one latent judge: how fast the judge rises, and the verifier with it.

    python -m scripts.lab judge                             run missing cells, then write picture and page
    python -m scripts.lab judge --write                     only write picture and page
    python -m scripts.lab judge NAME ... --seeds 0          only these recipes and seeds
    python -m scripts.lab judge --again NAME ... --seeds 0  run them anew

A cell is one recipe of configs/judge and one seed, kept in docs/rewards/judge.json as the lab keeps its own, with its
curve: every evaluation of the run, on all held-out captions and the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl import shapes
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import interval
from flowrl.media import media
from scripts.lab import runs
from scripts.lab.cells import Cells, Job, load, run_missing
from scripts.lab.page import commit_name, diversity, percent, row, table
from scripts.lab.proxy import arguments
from scripts.lab.recipes import ROOT, read_recipe
from scripts.lab.videos import SEEDS

RECIPES = ROOT / "configs" / "judge"
PAGES = ROOT / "docs" / "rewards"
NUMBERS, IMAGE, PAGE = PAGES / "judge.json", PAGES / "judge.svg", PAGES / "judge.md"
JUDGE, GOLD = "judge", "shapes_strict"
POLICY = "flow_grpo"
"""The recipe that the others are compared with."""
COLORS = {POLICY: "#2e6f95", "draft": "#d1495b", "refl": "#b07aa1", "draft_anchored": "#7a9e3f"} | {
    "adjoint_matching": "#e0a458",
    "leap_align": "#17a2a2",
    "flowbp": "#4c4c4c",
    "dance_grpo": "#8c564b",
    "euphonium": "#e377c2",
    "rocm": "#bcbd22",
    "srpo": "#8c6d31",
    "prfl": "#6a51a3",
}
IMAGES = ROOT / "runs" / "shapes-images"
"""Rendered images of the training captions, for recipes with `data.anchor`."""
BACKWARD = 2
"""Evaluations that a backward pass counts as."""
JUDGED = {POLICY: 1, "dance_grpo": 1, "srpo": 1 + 4 * (1 + BACKWARD) - 2 * BACKWARD}
"""Evaluations of the judge for a sample, where not one of a score and one with its gradient. SRPO: two branches under
two captions each, less the backward passes that two of its four forwards of the network lack."""


def recipes() -> dict[str, Path]:
    """Name -> file, in the order of the page."""
    return {name: RECIPES / f"{name}.yaml" for name in COLORS}


# ---- running


def true_images(recipe: Path) -> None:
    """Write the rendered images of the training captions that a recipe's `data.anchor` names, four of each."""
    anchor = read_recipe(recipe)["data"].get("anchor")
    folder = IMAGES if anchor else None
    if folder is None or (folder / "pairs.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = list[str]()
    for number, caption in enumerate(4 * shapes.prompts("train")):
        pixels = shapes.draw(shapes.parse(caption), np.random.default_rng(number))
        media.write(torch.from_numpy(pixels).float(), folder / str(number))
        lines.append(json.dumps({"prompt": caption, "chosen": f"{number}.png"}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")


def run_cell(name: str, seed: int) -> dict[str, Any]:
    """Train one cell as the lab does, in the run folder judge-NAME-seedN."""
    true_images(recipes()[name])
    run = runs.cell_run(f"judge-{name}", recipes()[name], seed)
    result = runs.run_cell(run)
    way = runs.evaluations(runs.RUNS / run.name)
    return result | {"curve": curve(runs.RUNS / run.name, way, recipes()[name]), "best": best(way)}


def curve(folder: Path, way: Sequence[Evaluation], recipe: Path) -> list[dict[str, float]]:
    """Means of every evaluation, with what the iterations until there have cost.

    `evaluations` are those of the network and of the judge, a backward pass as two: of a sample its rollout, its score,
    the forwards of its training with their backward passes and, of a method that climbs, the judge's gradient, or those
    of Euphonium's pull.
    """
    tree, rows = read_recipe(recipe), runs.all_rows(folder)
    samples = tree["rollout"]["prompts_per_iteration"] * tree["rollout"]["group_size"]
    judged = JUDGED.get(tree["algorithm"]["name"], 2 + BACKWARD)
    if tree["algorithm"]["name"] == "euphonium":  # the first step of a group starts at one place
        pulled = len(tree["algorithm"]["sde_steps"]) - 1 + 1 / tree["rollout"]["group_size"]
        judged = 1 + pulled * (1 + BACKWARD)
    per_row = [samples * (r["nfe/rollout"] + (1 + BACKWARD) * r["nfe/train"] + judged) for r in rows]
    spent = {
        "evaluations": np.concatenate([[0.0], np.cumsum(per_row)]),
        "cpu_seconds": np.concatenate([[0.0], np.cumsum([r["perf/cpu_s"] for r in rows])]),
    }
    return [
        {"iteration": each.iteration}
        | {name: round(float(values[each.iteration]), 1) for name, values in spent.items()}
        | {name: round(float(np.nanmean(each.scores[name])), 6) for name in (JUDGE, GOLD)}
        for each in way
    ]


def best(way: Sequence[Evaluation]) -> dict[str, Any]:
    """Gain of the best evaluation on the base in strict accuracy, with its interval over captions.

    Captions of an even number are measured at the evaluation that is best for those of an odd one, and the other way
    round, so that the luck of the choice is not in it.
    """
    means, groups = np.stack([np.nanmean(each.scores[GOLD], axis=1) for each in way]), way[0].groups
    gains, chosen = np.empty(len(groups)), []
    for half in (0, 1):
        here = groups % 2 == half
        place = int(means[:, ~here].mean(axis=1).argmax())
        gains[here] = means[place, here] - means[0, here]
        chosen.append(way[place].iteration)
    return {"gain": interval(gains, groups), "iterations": chosen}


def jobs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """The cells for `run_missing`, one seed of all recipes after the other."""
    for seed in seeds:
        for name in names:
            yield f"{name}/{seed}", partial(run_cell, name, seed)


# ---- the picture


def draw(cells: Cells, file: Path) -> None:
    """Judge and verifier against evaluations and against seconds, a line a cell."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "judge", "font.size": 9}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained", sharey="col")
    for line, (cost, label) in zip(
        panels, {"evaluations": "network evaluations", "cpu_seconds": "CPU seconds"}.items(), strict=True
    ):
        for panel, (metric, title) in zip(line, {JUDGE: "judge, logit", GOLD: "strict accuracy"}.items(), strict=True):
            for key, cell in cells.items():
                name, seed = key.split("/")
                points = cell["curve"]
                # The base stands at the left edge of a logarithmic axis.
                at = [max(point[cost], points[1][cost] / 2) for point in points]
                shown = {"color": COLORS[name], "linewidth": 1.0, "label": name if seed == "0" else None}
                panel.plot(at, [point[metric] for point in points], **shown)
            panel.set(xlabel=f"{label} of training", title=title, xscale="log")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


# ---- the page

TEXT = """\
# Reward gradients on a latent judge

Written by `python -m scripts.lab judge`; do not edit. All train tiny-sd3, and `rocm` its four-step student, on
`assets/tiny-judge` alone, which looks at clean latents, or with `euphonium` at noisy ones too; `shapes_strict` is only
evaluated, on all 512 held-out captions x 2 seeds at every evaluation. Recipes: `configs/judge`. An evaluation is a
forward of the network or of the judge for one sample; a backward counts two.

- *best*: strict accuracy at the best evaluation less the base's, chosen on one half of the captions and measured on the
  other, both ways, with a 95 % bootstrap interval over captions.
- *diversity*: at the end less the base's, of `eval.diversity`: log det of the colours' similarity of four samples, mean
  of 128 held-out captions.
- *to Flow-GRPO's judge*: the evaluations after which the judge stands where it stands at the end of Flow-GRPO with the
  same seed, as a share of Flow-GRPO's.
"""


def share_to_reach(cell: dict[str, Any], rival: dict[str, Any] | None) -> str:
    """Evaluations until the rival's last value of the judge, as a share of the rival's, in words."""
    if rival is None:
        return "-"
    goal, cost = rival["curve"][-1][JUDGE], rival["curve"][-1]["evaluations"]
    reached = next((point["evaluations"] for point in cell["curve"] if point[JUDGE] >= goal), None)
    return "not reached" if reached is None else f"{100 * reached / cost:.1f} %"


def page(cells: Cells) -> str:
    lines = [TEXT]
    if cells:
        lines += [f"![judge and strict verifier against evaluations and seconds]({IMAGE.name})", ""]
    lines += table(
        *("recipe", "seed", "judge, base -> end", "strict: base", "best (at iterations)", "end - base", "diversity"),
        *("evaluations", "to Flow-GRPO's judge", "CPU seconds", "commit"),
    )
    for name in recipes():
        for seed in SEEDS:
            cell = cells.get(f"{name}/{seed}")
            if cell is None:
                continue
            first, last, at = cell["curve"][0], cell["curve"][-1], cell["best"]
            chosen = " and ".join(map(str, dict.fromkeys(at["iterations"])))
            lines.append(
                row(
                    *(name, seed, f"{first[JUDGE]:.2f} -> {last[JUDGE]:.2f}", f"{100 * first[GOLD]:.1f}"),
                    f"{percent(at['gain'], '+')} ({chosen})",
                    percent(cell["summary"]["difference"][GOLD], "+"),
                    diversity(cell["summary"]),
                    f"{last['evaluations']:,.0f}",
                    share_to_reach(cell, cells.get(f"{POLICY}/{seed}")),
                    f"{last['cpu_seconds']:.0f}",
                    commit_name(cell["commit"]),
                )
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    args = arguments(__doc__, recipes())
    good = args.write or run_missing(jobs(args.names or list(recipes()), args.seeds), NUMBERS, again=args.again)
    cells = load(NUMBERS)
    if cells:
        draw(cells, IMAGE)
    PAGE.write_text(page(cells), encoding="utf-8")
    print(PAGE)
    return 0 if good else 1
