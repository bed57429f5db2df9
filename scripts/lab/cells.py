"""The lab: every recipe of configs/lab (and the quickstart) on seeds 0 to 2, and docs/lab.md.

    python -m scripts.lab                             run missing cells, then write the page
    python -m scripts.lab NAME ... --seeds 0          only these recipes and seeds
    python -m scripts.lab --again NAME ... --seeds 0  run them anew
    python -m scripts.lab --long NAME ...             the long runs instead of the cells; default: those of long.py
    python -m scripts.lab --steps                     the quickstart's seed 0, evaluated at more steps
    python -m scripts.lab --write                     only write the page, curves, and the gains that other pages quote
    python -m scripts.lab --check [NAME ...]          does seed 0 start with the same numbers? default: six recipes
    python -m scripts.lab --compare COMMIT            gains now against those of a commit; exit code 1 if one fell
    python -m scripts.lab --flat                      bytes of a flat picture, which the page counts sizes from
    python -m scripts.lab WORD ...                    another experiment: scripts/lab/README.md

    nohup python -m scripts.lab > runs/lab.log 2>&1 &

A cell is one recipe and seed; seed 0 of all recipes comes first. docs/lab/results.json keeps its result with commit,
date and processor, and of seed 0 the metrics of the first iterations. `--check` trains up to those iterations and
compares, about five minutes for the six. Where numbers moved, seed 0 of the recipes concerned runs anew; a change that
can move late numbers alone (weight average, schedules) runs seed 0 of one recipe.

Every cell is kept as soon as it is there. SIGTERM and Ctrl-C stop the run of a cell at the end of an iteration, kill -9
costs it at most 20 iterations, and the same command goes on with it. Runs are in runs/lab, or where FLOWRL_LAB_RUNS
says. A cell trains in two processes: with another number the batches, and so the last digits, are others.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lab.compare import compare
from scripts.lab.curves import draw_curves
from scripts.lab.edits import edits_section
from scripts.lab.long import LONG, draw, long_section, run_long
from scripts.lab.page import EDIT, METRIC, MOTION, Entry, flat_kilobytes, page
from scripts.lab.quotes import bring_up_to_date
from scripts.lab.recipes import ROOT, read_recipe, recipes
from scripts.lab.replay import differences, replay
from scripts.lab.runs import RUNS, Failed, Run, cell_run, first_rows, processor, read, run_cell, write
from scripts.lab.steps import measure, steps_section
from scripts.lab.videos import SEEDS, seeds_of, videos_section

RESULTS = ROOT / "docs" / "lab" / "results.json"
LONG_RESULTS = ROOT / "docs" / "lab" / "long.json"
STEPS_RESULTS = ROOT / "docs" / "lab" / "steps.json"
PICTURE = ROOT / "docs" / "lab" / "long.svg"
CURVES = ROOT / "docs" / "lab" / "curves"
PAGE = ROOT / "docs" / "lab.md"
PREFERRING = ("diffusion_dpo", "online_dpo")
WORLDS = {"shapes_motion": MOTION, "shapes_edit": EDIT}
"""Reward -> strict accuracy of the recipes that are judged by it; the others': `METRIC`."""
CHECKED = ("quickstart", "flow_grpo", "branch_grpo", "diffusion_nft", "sd-ddpo", "video-sage_grpo")
"""Recipes that `--check` replays: chains on every kind of process and on videos, a tree, finished samples."""
Cells = dict[str, dict[str, Any]]
"""`<recipe>/<seed>` -> cell."""
Job = tuple[str, Callable[[], dict[str, Any]]]
"""Key of a cell, and what makes it."""


# ---- running


def run_missing(jobs: Iterable[Job], file: Path, *, again: bool = False) -> bool:
    """Run the cells that were not, or all of them anew, and keep each in `file`; whether none failed."""
    failed: list[str] = []
    for key, make in jobs:
        if key in load(file) and not again:
            continue
        print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
        try:
            cell = make()
        except Failed as error:
            failed.append(key)
            print(f"{key}: {error}", flush=True)
            continue
        # Read again: hours may have passed, and another process may have kept cells.
        write_results(load(file) | {key: cell}, file)
        spent = cell["summary"]
        print(f"{key}: kept after {spent['seconds']:.0f} s, {spent['cpu_seconds']:.0f} s of CPU", flush=True)
    if failed:
        print(f"not kept: {', '.join(failed)}", flush=True)
    return not failed


def make_cell(run: Run) -> dict[str, Any]:
    """A cell; of seed 0 with its first metrics, which `--check` compares.

    Raises:
        Failed: the run did not finish.
    """
    cell = run_cell(run)
    return cell if run.seed else cell | {"start": first_rows(RUNS / run.name)}


def cell_jobs(chosen: dict[str, Path], seeds: Iterable[int]) -> Iterable[Job]:
    """One seed of all recipes after the other."""
    for seed in seeds:
        for name, recipe in chosen.items():
            if seed in seeds_of(name):
                yield f"{name}/{seed}", partial(make_cell, cell_run(name, recipe, seed))


def long_jobs(chosen: dict[str, Path]) -> Iterable[Job]:
    for name, recipe in chosen.items():
        yield f"{name}/0", partial(run_long, name, recipe)


def check_recipe(name: str, recipe: Path, results: Cells) -> bool:
    """Replay the start of seed 0 of a recipe; whether every number is as its cell has it."""
    cell = results.get(f"{name}/0")
    if cell is None:
        print(f"{name}: not run, nothing to compare with", flush=True)
        return False
    found = differences(cell, replay(cell_run(name, recipe, 0)))
    if found:
        print(f"{name}: other numbers than at {cell['commit']} on {cell['processor']}, here {processor()}")
        print("\n".join(f"  {text}" for text in found))
        print(f"If the code means it: python -m scripts.lab --again {name} --seeds 0", flush=True)
    else:
        print(f"{name}: the same numbers", flush=True)
    return not found


# ---- the files


def load(file: Path) -> Cells:
    return read(file) if file.is_file() else {}


def write_results(results: Cells, file: Path | None = None) -> None:
    """One cell to a line: short, and two branches that add cells merge."""
    file = file or RESULTS
    lines = (f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in results.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, "{\n" + ",\n".join(lines) + "\n}\n")


def read_entry(name: str, recipe: Path, results: Cells) -> Entry:
    """A recipe as the page shows it."""
    tree = read_recipe(recipe)
    source = ROOT / "flowrl" / "algorithms" / f"{tree['algorithm']['name']}.py"
    level = re.search(r'^LEVEL = "(\w+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    rewards = {entry["name"] for entry in (*tree.get("rewards", []), *tree["eval"].get("rewards", []))}
    return Entry(
        name=name,
        level=level[1] if level else "experimental",
        searched=bool(tree["eval"].get("best_guidance")),
        cells={seed: results.get(f"{name}/{seed}") for seed in seeds_of(name)},
        sized={entry["name"] for entry in tree.get("rewards", [])} == {"jpeg"},
        preferring=tree["algorithm"]["name"] in PREFERRING,
        metric=next((metric for name, metric in WORLDS.items() if name in rewards), METRIC),
    )


def write_page() -> None:
    """docs/lab.md with its pictures from the files of results, and the gains that other pages quote."""
    results, long = load(RESULTS), load(LONG_RESULTS)
    entries = [read_entry(name, recipe, results) for name, recipe in recipes().items()]
    keys = [f"{name}/0" for name in recipes() if f"{name}/0" in long]
    if keys:
        draw(long, results, keys, PICTURE)
    parts = steps_section(load(STEPS_RESULTS))
    parts += long_section(long, results, keys)
    parts += videos_section([entry for entry in entries if entry.metric == MOTION])
    parts += edits_section([entry for entry in entries if entry.metric == EDIT])
    PAGE.write_text(page(entries, parts), encoding="utf-8")
    print(PAGE)
    gains = {
        each.name: [100 * values["difference"][each.metric]["mean"] for values in each.summaries] for each in entries
    }
    bring_up_to_date(ROOT / "docs", gains)
    draw_curves(entries, CURVES)


# ---- the command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="default: all")
    parser.add_argument("--long", action="store_true", help="the long runs instead of the cells")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="only write the page")
    what.add_argument("--check", action="store_true", help="replay the start of seed 0 and compare; 1 if numbers moved")
    what.add_argument("--again", action="store_true", help="run the named recipes anew")
    what.add_argument("--steps", action="store_true", help="evaluate the quickstart's seed 0 at more steps")
    what.add_argument("--compare", metavar="COMMIT", help="gains now against those of a commit; 1 if one fell")
    what.add_argument("--flat", action="store_true", help="only print the bytes of a flat picture")
    return parser


def chosen_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Path]:
    """The recipes that a command is about; refuses what does not go together."""
    if unknown := sorted(set(args.names) - recipes().keys()):
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(recipes())}")
    if args.check and args.long:
        parser.error("--check replays cells, which --long is not about")
    if args.again and not args.names:
        parser.error("--again wants the names of recipes")
    wanted: Sequence[str] = args.names or (CHECKED if args.check else LONG if args.long else tuple(recipes()))
    return {name: recipe for name, recipe in recipes().items() if name in wanted}


def steps_measured() -> None:
    try:
        write(STEPS_RESULTS, json.dumps(measure(recipes()["quickstart"])) + "\n")
    except Failed as error:
        raise SystemExit(str(error)) from None


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.flat:
        print(f"{1000 * flat_kilobytes():.0f}")
        return 0
    chosen, good = chosen_of(args, parser), True
    if args.compare:
        lines, good = compare(args.compare, list(chosen), load(RESULTS))
        print("\n".join(lines))
        return 0 if good else 1
    if args.check:
        results = load(RESULTS)
        return 0 if all([check_recipe(name, recipe, results) for name, recipe in chosen.items()]) else 1
    if args.steps:
        steps_measured()
    elif not args.write:
        jobs = long_jobs(chosen) if args.long else cell_jobs(chosen, args.seeds)
        good = run_missing(jobs, LONG_RESULTS if args.long else RESULTS, again=args.again)
    write_page()
    return 0 if good else 1
