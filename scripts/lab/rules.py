"""Small rules of losses, credit and draws: does a recipe with one gain more than without?

    python -m scripts.lab rules [NAME ...] [--seeds 0]    run missing cells, then write the tables of the page
    python -m scripts.lab rules --write                   only write the tables
    python -m scripts.lab rules --again NAME ...          run these anew; a name is STUDY or STUDY/ROW

A cell is a row of scripts/lab/rules.yaml and a seed, trained in one process as the lab trains in two, kept in
docs/lab/rules.json and shown in docs/concepts/rules.md. It can be stopped at any time, and the same command goes on.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flowrl.apps.set_measures import features_of
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import interval
from flowrl.statistics.sets import kid, precision_recall, vendi
from scripts.lab import runs
from scripts.lab.cells import Cells, Job, load, run_missing
from scripts.lab.page import METRIC, commit_name, percent, row, table
from scripts.lab.proxy import arguments
from scripts.lab.recipes import ROOT, recipes

NUMBERS, PAGE = ROOT / "docs" / "lab" / "rules.json", ROOT / "docs" / "concepts" / "rules.md"
PAIRS = "runs/pairs-shapes"
PAIRED = ("matching/error_chosen", "policy/implicit_accuracy", "policy/gradient_factor")
KEPT = ("reward/group_std", "advantage/dead_group_share", "policy/clip_fraction", *PAIRED)
"""Metrics of which a cell keeps the means over the first and the last fifth of the iterations."""
FIRST = 8
"""Iterations whose mean is where the error on the preferred images starts: 512 pairs of diffusion_dpo."""
SUMMARY = ("seconds", "cpu_seconds", "load", "parts", "iterations", "difference", "diversity", "best_of")
MANY = 4
"""Images of which the best counts."""
SETS, FEATURES = 256, "tiny-clip"
"""Captions of a set of images along a run, one image each, and what the images are compared by."""
Cell = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a study: overrides of a recipe, which the rows that are `stored` add nothing to."""

    study: str
    name: str
    recipe: str
    words: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    flip: float = 0.0
    """Share of the pairs whose labels are turned round."""
    less: str
    """Row that it is compared with."""
    stored: bool = False
    """Whether it is read from the lab's run folder of its recipe and seed, and not trained."""
    shows: tuple[str, ...] = ()
    """Further columns of the study's table, of COLUMNS."""
    way: bool = False
    """Whether measures of sets are kept of every evaluation, whose images must be saved."""


def rows() -> dict[str, list[Row]]:
    """Study -> its rows, in the order of the page."""
    result: dict[str, list[Row]] = {}
    for study, tree in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        members, words = tree.pop("rows"), tree.pop("words", [])
        shared = {"less": next(iter(members))} | tree
        result[study] = []
        for name, own in members.items():
            values = {"recipe": name} | shared | own
            flipped = [f"data.pairs.path={flipped_path(own['flip'])}"] if "flip" in own else []
            values |= {"words": tuple(flipped + words + own.get("words", []))}
            values |= {key: tuple(values[key]) for key in ("seeds", "shows") if key in values}
            result[study].append(Row(study=study, name=name, **values))
    return result


# ---- running


def flipped_path(share: float) -> str:
    return f"{PAIRS}-flipped{100 * share:.0f}"


def flip_labels(source: Path, target: Path, share: float, seed: int = 0) -> None:
    """Copy a preference set with a share of its pairs turned round; a larger share contains a smaller one."""
    records = [json.loads(line) for line in (source / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    for at in np.random.default_rng(seed).permutation(len(records))[: round(share * len(records))]:
        record = records[at]
        for one, other in (("chosen", "rejected"), ("chosen_scores", "rejected_scores")):
            record[one], record[other] = record[other], record[one]
    text, file = "".join(json.dumps(record) + "\n" for record in records), target / "pairs.jsonl"
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        shutil.copytree(source, target, dirs_exist_ok=True)
        runs.write(file, text)


def run_cell(own: Row, seed: int) -> Cell:
    """Train a row, or look for its stored run. Raises Failed: it did not finish, or is not there."""
    recipe = recipes()[own.recipe]
    if own.flip:
        runs.make_pairs(recipe)
        flip_labels(ROOT / PAIRS, ROOT / flipped_path(own.flip), own.flip)
    name = f"{own.recipe}-seed{seed}" if own.stored else f"rules-{own.study}-{own.name}-seed{seed}"
    folder = runs.RUNS / name
    if not own.stored:
        runs.run_cell(runs.Run(name, recipe, seed, own.words, processes=1))
    elif not (folder / "summary.json").is_file():
        raise runs.Failed(f"{folder} is no finished run; python -m scripts.lab {own.recipe} --seeds {seed} makes it")
    return kept(folder) | ({"way": along(folder)} if own.way else {})


def kept(folder: Path) -> Cell:
    """What is kept of a finished run; `right` has a digit a caption: how many of its `images` are right."""
    both = {tag: Evaluation.load(folder / "eval" / f"{tag}.json") for tag in ("base", "tuned")}
    counts = {tag: each.scores[METRIC].sum(axis=1).astype(int) for tag, each in both.items()}
    told = {"images": both["base"].seeds, "right": {tag: "".join(map(str, each)) for tag, each in counts.items()}}
    summary = runs.measured(folder) | runs.costs(folder)
    summary = {key: summary[key] for key in SUMMARY if key in summary}
    told |= {"summary": summary, "curve": runs.curve(folder, SETS)}
    rows = runs.all_rows(folder)
    if PAIRED[0] in rows[0]:
        told |= {"start": round(float(np.mean([each[PAIRED[0]] for each in rows[:FIRST]])), 6)}
    return runs.origin(folder) | told | {"metrics": fifths(rows)}


def along(folder: Path) -> list[dict[str, float]]:
    """Accuracy, diversity and measures of sets at every evaluation, on the first captions and seed 0.

    Sets are compared with the base's at seed 1, so the base's own row says what chance makes of them.
    """

    def features(tag: str, seed: int) -> np.ndarray:
        return features_of(folder / "eval" / tag, FEATURES)[seed][:SETS]

    rows, real = [], features("base", 1)
    for each in runs.evaluations(folder):
        made = features(each.tag, 0)
        precision, recall = precision_recall(made, real)
        row = {"strict": each.scores[METRIC][:SETS].mean(), "diversity": np.nan, "kid": kid(made, real)}
        row |= {"precision": precision, "recall": recall, "vendi": vendi(made)}
        if each.diversity is not None:
            row["diversity"] = np.nanmean(each.diversity)
        rows.append({"iteration": each.iteration} | {name: round(float(value), 5) for name, value in row.items()})
    return rows


def fifths(metrics: Sequence[Cell]) -> dict[str, list[float]]:
    """Metric -> its means over the first and the last fifth of the iterations, of those that have it."""
    size = max(1, len(metrics) // 5)
    found = {n: [[each[n] for each in part if n in each] for part in (metrics[:size], metrics[-size:])] for n in KEPT}
    return {n: [round(float(np.mean(part)), 6) for part in parts] for n, parts in found.items() if all(parts)}


def jobs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """The cells for `run_missing`, in the order of the studies."""
    for own in (own for members in rows().values() for own in members):
        if not names or own.study in names or f"{own.study}/{own.name}" in names:
            yield from ((f"{own.study}/{own.name}/{k}", partial(run_cell, own, k)) for k in own.seeds if k in seeds)


# ---- the tables


def best_of(cell: Cell, tag: str, count: int = 1) -> np.ndarray:
    """Share of draws of so many images a caption with a right one among them, [P]; unbiased.

    Right images have the largest reward, so this is the best by the reward, judged by strict accuracy.
    """
    wrong = [math.comb(cell["images"] - int(each), count) for each in cell["right"][tag]]
    return 1 - np.asarray(wrong) / math.comb(cell["images"], count)


def between(one: np.ndarray, other: np.ndarray) -> str:
    """Mean of one - other over captions in points, with its interval; the captions all differ."""
    return percent(interval(one - other), "+")


def gain(cell: Cell) -> float:
    return float((best_of(cell, "tuned") - best_of(cell, "base")).mean())


def best(cell: Cell, other: Cell) -> str:
    levels = " to ".join(f"{100 * best_of(cell, tag, MANY).mean():.1f}" for tag in ("base", "tuned"))
    both = [best_of(each, "tuned", MANY) for each in (cell, other)]
    return levels if other is cell else f"{levels}; {between(*both)}"


def chosen(cell: Cell, other: Cell) -> str:
    """The base's best of several by the trained reward, by strict accuracy, and the tuned model's single image."""
    found = cell["summary"]["best_of"]
    judge = found["judges"][METRIC]
    base, change = judge["base"][MANY - 1]["mean"], judge["rival"][MANY - 1]
    return f"{100 * base:.1f} by {found['by']}; {percent(change, '+')}"


def rival(cell: Cell, other: Cell) -> str:
    most = best_of(cell, "base", cell["images"])
    return f"{100 * most.mean():.1f} of {cell['images']}; {between(best_of(cell, 'tuned'), most)}"


def fall(cell: Cell, other: Cell) -> str:
    """Strict accuracy at the best evaluation of the way and at the end, on the same captions."""
    way = [100 * point[METRIC] for point in cell["curve"]]
    return f"{max(way):.1f} to {way[-1]:.1f}"


def metric(name: str, cell: Cell, other: Cell) -> str:
    return " to ".join(f"{value:.3f}" for value in cell["metrics"][name])


def winner(cell: Cell, other: Cell) -> str:
    """Error on the preferred images where it starts and over the last fifth, and their ratio."""
    start, end = cell["start"], cell["metrics"][PAIRED[0]][-1]
    return f"{start:.3f} to {end:.3f}, x {end / start:.2f}"


COLUMNS: dict[str, tuple[str, Callable[[Cell, Cell], str]]] = {
    "share": ("share of that gain", lambda cell, other: f"{100 * gain(cell) / gain(other):.0f} %"),
    "best": (f"best of {MANY}, base to tuned; less the row", best),
    "fall": ("best on the way to end", fall),
    "winner": ("winner's error", winner),
    "accuracy": ("agreement", partial(metric, PAIRED[1])),
    "factor": ("gradient factor", partial(metric, PAIRED[2])),
    "chosen": (f"base, best of {MANY} by the proxy; tuned, one image, less that", chosen),
    "rival": ("base, best of n; tuned, one image, less that", rival),
    "spread": ("std in a group", partial(metric, KEPT[0])),
    "dead": ("dead groups", partial(metric, KEPT[1])),
    "clip": ("clipped terms", partial(metric, KEPT[2])),
}
"""Name -> title, and the text of a cell and of the one that it is compared with, which may be itself."""


def study_table(members: Sequence[Row], cells: Cells) -> str:
    """Markdown of the rows that were measured, and below it their commands."""
    shown, commands = [COLUMNS[name] for name in members[0].shows], list[str]()
    titles = ("row", "seed", "base", "gain, points", "less the row", *(title for title, _ in shown))
    lines = table(*titles, "CPU seconds", "commit")
    for own in members:
        there = [(seed, cells[key]) for seed in own.seeds if (key := f"{own.study}/{own.name}/{seed}") in cells]
        command = ["flowrl", "train", str(recipes()[own.recipe].relative_to(ROOT)), *own.words]
        commands += [f"{own.name}: {shlex.join(command)}"] if there and not own.stored else []
        for seed, cell in there:
            other = cells.get(f"{own.study}/{own.less}/{seed}", cell)
            now, base = best_of(cell, "tuned"), best_of(cell, "base")
            less = "-" if other is cell else f"{own.less}: {between(now, best_of(other, 'tuned'))}"
            first = own.name, seed, f"{100 * base.mean():.1f}", between(now, base), less
            spent = f"{cell['summary']['cpu_seconds']:.0f}", commit_name(cell["commit"])
            lines.append(row(*first, *(text(cell, other) for _, text in shown), *spent))
    ways = way_tables(members, cells) if members[0].way else []
    return "\n".join([*lines, *ways, *(["", "```", *commands, "```"] if commands else [])])


def way_tables(members: Sequence[Row], cells: Cells) -> list[str]:
    """A table a cell: what its evaluations found on the way."""
    lines, names = [], ("strict", "diversity", "kid", "precision", "recall", "vendi")
    for key in (key for own in members for seed in own.seeds if (key := f"{own.study}/{own.name}/{seed}") in cells):
        lines += ["", *table(f"{key.split('/')[1]}, at iteration", "strict", *names[1:])]
        for each in cells[key]["way"]:
            first = str(each["iteration"]), f"{100 * each['strict']:.1f}", f"{each['diversity']:.3f}"
            lines.append(row(*first, f"{each['kid']:+.2g}", *(f"{each[name]:.3f}" for name in names[3:])))
    return lines


def write_page(cells: Cells) -> None:
    """Put each study's table between its marks in the page; a study without marks is not on it."""
    text = PAGE.read_text(encoding="utf-8")
    for study, members in rows().items():
        before, start, rest = text.partition(f"<!-- rules_{study} -->\n")
        _, end, after = rest.partition(f"\n<!-- end of rules_{study} -->")
        text = before + start + study_table(members, cells) + end + after if end else text
    runs.write(PAGE, text)


def main() -> int:
    known = [name for study, members in rows().items() for name in (study, *(f"{study}/{own.name}" for own in members))]
    args = arguments(__doc__, known)
    good = args.write or run_missing(jobs(args.names, args.seeds), NUMBERS, again=args.again)
    write_page(load(NUMBERS))
    print(PAGE)
    return 0 if good else 1
