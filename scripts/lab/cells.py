"""Run the lab: every recipe of configs/lab (and the quickstart) on seeds 0 to 2, and write docs/lab.md.

    python -m scripts.lab                      run missing cells, then write the page
    python -m scripts.lab --stale              run stale cells too
    python -m scripts.lab --seeds 0 NAME ...   only these seeds and recipes
    python -m scripts.lab --long NAME ...      the long runs instead of the cells; default: those of long.py
    python -m scripts.lab --steps              the quickstart's seed 0, evaluated at more steps
    python -m scripts.lab --write              only write the page, curves, and the gains that docs/algorithms quotes
    python -m scripts.lab --check              replay the start of stale recipes: are the numbers still the same?
                                               with --long: of stale long runs
    python -m scripts.lab --compare COMMIT     gains now against those of a commit; exit code 1 if one fell
    python -m scripts.lab --flat               bytes of a flat picture, which the page counts sizes from

    nohup python -m scripts.lab --stale > runs/lab.log 2>&1 &

A cell is one recipe and seed; seed 0 of all recipes comes first. docs/lab/results.json keeps its result with two
fingerprints, of the recipe with its model and of the code that can change a number, and with the metrics of its first
iterations. A cell is stale when a fingerprint differs. Where it is the code's alone, `--check` runs the recipe up to
those iterations and compares: equal numbers make the cells fresh again, without the minutes that a whole run takes.

Every cell is kept as soon as it is there. SIGTERM and Ctrl-C stop the run of a cell at the end of an iteration, kill -9
costs it at most 20 iterations, and the same command goes on with it. Runs are in runs/lab, or where FLOWRL_LAB_RUNS
says. A cell trains in two processes: with another number the batches, and so the last digits, are others.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lab.compare import compare
from scripts.lab.curves import draw_curves
from scripts.lab.fingerprints import ROOT, Fingerprints, fingerprints, read_recipe, state
from scripts.lab.long import LONG, draw, long_run, long_section, run_long
from scripts.lab.page import Entry, flat_kilobytes, page
from scripts.lab.quotes import bring_up_to_date
from scripts.lab.replay import differences, replay
from scripts.lab.runs import RUNS as RUNS
from scripts.lab.runs import Failed, cell_run, read, run_cell, write
from scripts.lab.runs import Run as Run
from scripts.lab.steps import measure, steps_section
from scripts.lab.videos import SEEDS, seeds_of, videos_section

RESULTS = ROOT / "docs" / "lab" / "results.json"
LONG_RESULTS = ROOT / "docs" / "lab" / "long.json"
STEPS_RESULTS = ROOT / "docs" / "lab" / "steps.json"
PICTURE = ROOT / "docs" / "lab" / "long.svg"
CURVES = ROOT / "docs" / "lab" / "curves"
PAGE = ROOT / "docs" / "lab.md"
PREFERRING = ("diffusion_dpo", "online_dpo")
Cells = dict[str, dict[str, Any]]
"""`<recipe>/<seed>` -> cell."""
Job = tuple[str, Path, Callable[[Fingerprints], dict[str, Any]]]
"""Key of a cell, its recipe, and what makes it."""


def recipes() -> dict[str, Path]:
    """Name -> file, the quickstart first."""
    result = {"quickstart": ROOT / "configs" / "quickstart.yaml"}
    return result | {file.stem: file for file in sorted((ROOT / "configs" / "lab").glob("*.yaml"))}


# ---- running


def run_missing(jobs: Iterable[Job], file: Path, *, stale: bool) -> bool:
    """Run the cells that were not, and the stale ones if asked to, and keep each in `file`; whether none failed."""
    failed: list[str] = []
    for key, recipe, make in jobs:
        now = fingerprints(recipe)
        verdict = state(load(file).get(key), now)
        if verdict != "not run" and not (stale and verdict.startswith("stale")):
            continue
        print(f"{time.strftime('%H:%M:%S')} {key}: {verdict}", flush=True)
        try:
            cell = make(now)
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


def cell_jobs(chosen: dict[str, Path], seeds: Iterable[int]) -> Iterable[Job]:
    """One seed of all recipes after the other."""
    for seed in seeds:
        for name, recipe in chosen.items():
            if seed in seeds_of(name):
                yield f"{name}/{seed}", recipe, partial(run_cell, cell_run(name, recipe, seed))


def long_jobs(chosen: dict[str, Path]) -> Iterable[Job]:
    for name, recipe in chosen.items():
        yield f"{name}/0", recipe, partial(run_long, name, recipe)


def long_of(name: str, recipe: Path, seed: int) -> Run:
    """The long run of a recipe; there is one seed."""
    return long_run(name, recipe)


def check_recipe(
    name: str, recipe: Path, results: dict[str, Any], seeds: list[int], run: Callable[[str, Path, int], Run] = cell_run
) -> bool:
    """Replay a recipe whose cells are stale by their code; make them fresh where every number is the same.

    `run`: of a cell, by the recipe's name, the recipe and the seed.
    """
    now, same = fingerprints(recipe), True
    groups: dict[str, list[int]] = {}
    for seed in seeds:
        cell = results.get(f"{name}/{seed}")
        verdict = state(cell, now)
        if verdict == "stale: code":
            # A replay speaks for the code by which its cell was fresh, measured or replayed, and for no other.
            groups.setdefault(cell.get("checked", cell)["code"], []).append(seed)
        elif verdict == "stale: recipe":
            print(f"{name} seed {seed}: the recipe or its model changed, which no replay mends; use --stale")
            same = False
    for members in groups.values():
        cell = results[f"{name}/{members[0]}"]
        replayed = replay(run(name, recipe, members[0]))
        result = differences(cell, replayed)
        if result:
            same = False
            print(f"{name}: seed {members[0]} gives other numbers, seeds {members} stay stale")
            print("\n".join(f"  {text}" for text in result))
            for key, value in cell["replay"]["machine"].items():
                if replayed["machine"][key] != value:
                    print(f"  (recorded with {key} {value}, now {replayed['machine'][key]}: it may be the machine's)")
            continue
        print(f"{name}: seed {members[0]} gives the same numbers, seeds {members} are fresh")
        for seed in members:
            checked = {"code": now.code, "commit": replayed["commit"], "seed": members[0]}
            results[f"{name}/{seed}"]["checked"] = checked
    return same


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
    tree, now = read_recipe(recipe), fingerprints(recipe)
    source = ROOT / "flowrl" / "algorithms" / f"{tree['algorithm']['name']}.py"
    level = re.search(r'^LEVEL = "(\w+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    cells = {seed: results.get(f"{name}/{seed}") for seed in seeds_of(name)}
    rewards = {entry["name"] for entry in (*tree.get("rewards", []), *tree["eval"].get("rewards", []))}
    return Entry(
        name=name,
        level=level[1] if level else "experimental",
        searched=bool(tree["eval"].get("best_guidance")),
        cells=cells,
        states={seed: state(cell, now) for seed, cell in cells.items()},
        sized={entry["name"] for entry in tree.get("rewards", [])} == {"jpeg"},
        preferring=tree["algorithm"]["name"] in PREFERRING,
        moving="shapes_motion" in rewards,
    )


def write_page() -> None:
    """docs/lab.md and its picture, from the files of results and the notes, and gains that other pages quote."""
    results, long = load(RESULTS), load(LONG_RESULTS)
    entries = [read_entry(name, recipe, results) for name, recipe in recipes().items()]
    keys = {f"{name}/0": recipe for name, recipe in recipes().items() if f"{name}/0" in long}
    states = {key: state(long[key], fingerprints(recipe)) for key, recipe in keys.items()}
    notes = ROOT / "docs" / "lab" / "notes.md"
    text = notes.read_text(encoding="utf-8") if notes.is_file() else ""
    if states:
        draw(long, results, list(states), PICTURE)
    steps = load(STEPS_RESULTS)
    parts = steps_section(steps, state(steps, fingerprints(recipes()["quickstart"])) if steps else "")
    parts += long_section(long, results, states)
    parts += videos_section([entry for entry in entries if entry.moving])
    PAGE.write_text(page(entries, parts, text), encoding="utf-8")
    print(PAGE)
    gains = {
        each.name: [100 * values["difference"][each.metric]["mean"] for values in each.summaries] for each in entries
    }
    bring_up_to_date(ROOT / "docs", gains)
    draw_curves(entries, CURVES)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="default: all")
    parser.add_argument("--long", action="store_true", help="the long runs instead of the cells")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="only write the page")
    what.add_argument("--check", action="store_true", help="replay stale recipes and compare; 1 if any stays stale")
    what.add_argument("--stale", action="store_true", help="run stale cells again")
    what.add_argument("--steps", action="store_true", help="evaluate the quickstart's seed 0 at more steps")
    what.add_argument("--compare", metavar="COMMIT", help="gains now against those of a commit; 1 if one fell")
    what.add_argument("--flat", action="store_true", help="only print the bytes of a flat picture")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.flat:
        print(f"{1000 * flat_kilobytes():.0f}")
        return
    unknown = sorted(set(args.names) - recipes().keys())
    if unknown:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(recipes())}")
    wanted, good = args.names or (LONG if args.long else recipes()), True
    chosen = {name: recipe for name, recipe in recipes().items() if name in wanted}
    if args.compare:
        cells = load(RESULTS).items()
        # A recipe that was changed since says nothing about the one of now.
        same = {name: fingerprints(recipe).recipe for name, recipe in chosen.items()}
        now = {key: cell for key, cell in cells if same.get(key.rpartition("/")[0]) == cell["recipe"]}
        lines, good = compare(args.compare, list(chosen), now)
        print("\n".join(lines))
        raise SystemExit(0 if good else 1)
    if args.check:
        file, seeds, run = (LONG_RESULTS, [0], long_of) if args.long else (RESULTS, list(args.seeds), cell_run)
        results = load(file)
        # As Ctrl-C: what was replayed until then is kept.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            good = all([check_recipe(name, recipe, results, seeds, run) for name, recipe in chosen.items()])
        finally:
            # Not after each recipe: the file would be an uncommitted change in the next one's provenance.
            write_results(results, file)
    elif args.steps:
        recipe = recipes()["quickstart"]
        try:
            write(STEPS_RESULTS, json.dumps(measure(recipe, fingerprints(recipe))) + "\n")
        except Failed as error:
            raise SystemExit(str(error)) from None
    elif not args.write:
        jobs = long_jobs(chosen) if args.long else cell_jobs(chosen, args.seeds)
        good = run_missing(jobs, LONG_RESULTS if args.long else RESULTS, stale=args.stale)
    write_page()
    raise SystemExit(0 if good else 1)
