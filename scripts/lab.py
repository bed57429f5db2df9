"""Run the lab: every recipe of configs/lab (and the quickstart) on seeds 0 to 2, and write docs/lab.md.

    python scripts/lab.py                      run missing cells, then write the page
    python scripts/lab.py --write              only write the page
    python scripts/lab.py --check              replay the start of stale recipes: are the numbers still the same?
    python scripts/lab.py --stale              run stale cells too
    python scripts/lab.py --seeds 0 NAME ...   only these seeds and recipes
    python scripts/lab.py --flat               bytes of a flat picture, which the page counts sizes from

A cell is one recipe and seed. docs/lab/results.json keeps its result with two fingerprints, of the recipe with its
model and of the code that can change a number, and with the metrics of its first iterations. A cell is stale when a
fingerprint differs. Where it is the code's alone, `--check` runs the recipe up to those iterations and compares: equal
numbers make the cells fresh again, without the minutes that a whole run takes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _lab_fingerprints import ROOT, Fingerprints, fingerprints, read_recipe, state
from _lab_page import METRIC, Entry, flat_kilobytes, page

from flowrl.core.rows import repeatable

RESULTS = ROOT / "docs" / "lab" / "results.json"
PAGE = ROOT / "docs" / "lab.md"
RUNS = ROOT / "runs" / "lab"
SEEDS = (0, 1, 2)
REPLAYED = 3
"""Iterations that a replay compares."""
PAIRS = {
    "runs/pairs-shapes": (
        "configs/lab/online_dpo.yaml",
        "rewards=[{name: shapes, outputs: {shapes_partial: 1.0}}]",
        *("--count", "2000", "--per-prompt", "4"),
    )
}
"""Folder of a preference set -> the words of `flowrl pairs` that make it."""
PREFERRING = ("diffusion_dpo", "online_dpo")
MACHINE = ("hardware", "threads_per_process", "python", "torch", "diffusers", "transformers")


def recipes() -> dict[str, Path]:
    """Name -> file, the quickstart first."""
    result = {"quickstart": ROOT / "configs" / "quickstart.yaml"}
    return result | {file.stem: file for file in sorted((ROOT / "configs" / "lab").glob("*.yaml"))}


# ---- running


def processor() -> str:
    """The processor's name; provenance.json has its architecture only."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    result = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return result[1].strip() if result else platform.processor() or "unknown"


def machine(facts: dict[str, Any]) -> dict[str, Any]:
    """Where other numbers may come from than from the code, out of a run's provenance."""
    return {"processor": processor()} | {key: facts[key] for key in MACHINE}


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def first_rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the first iterations of a run folder that are whole, without what depends on the machine."""
    file, rows = folder / "metrics.jsonl", []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    for line in lines[:REPLAYED]:
        if line.endswith("\n"):
            rows.append(repeatable(json.loads(line)))
    return rows


def measured(folder: Path) -> dict[str, Any]:
    """What a cell keeps of a finished run: its summary, evaluations per sample and commit, and the replay's numbers."""
    summary, facts = _read(folder / "summary.json"), _read(folder / "provenance.json")
    kept = (
        "seconds",
        "iterations",
        "base",
        "base_best_guidance",
        "tuned",
        "difference",
        "win_rate",
        "implicit_accuracy",
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # Where samples are given, none are drawn.
    evaluations = {part: sum(row.get(f"nfe/{part}", 0) for row in rows) / len(rows) for part in ("rollout", "train")}
    result = {"evaluations": evaluations, "commit": facts["commit"], "curve": curve(folder, rows)}
    return {
        "summary": {key: summary[key] for key in kept if key in summary} | result,
        "replay": {"machine": machine(facts), "rows": first_rows(folder)},
    }


def curve(folder: Path, rows: list[dict[str, Any]]) -> list[list[float]]:
    """[seconds of iterations so far, accuracy] of every evaluation on the way and of the end, on the same captions."""
    spent, points, captions = 0.0, [], 0
    for row in rows:
        spent += row["time/iteration_s"]
        if f"eval/{METRIC}" in row:
            captions = len(_read(folder / "eval" / f"iteration-{row['iteration']:06d}.json")["prompts"])
            points.append([round(spent, 1), row[f"eval/{METRIC}"]])
    if not points:
        return []
    scores = _read(folder / "eval" / "tuned.json")["scores"][METRIC][:captions]
    values = [value for row in scores for value in row if value is not None]
    return [*points, [round(spent, 1), sum(values) / len(values)]]


def train_command(name: str, recipe: Path, seed: int, output: Path) -> tuple[list[str], Path]:
    """The command that trains a cell in two processes, and its run folder; a replay differs in the folder alone."""
    run = f"{name}-seed{seed}"
    words = ["train", str(recipe), f"name={run}", f"output={output}", f"seed={seed}", "--processes", "2"]
    return [sys.executable, "-m", "flowrl", *words], output / run


def make_pairs(recipe: Path) -> None:
    """The preference set that a recipe learns from; one that is complete is left as it is."""
    pairs = read_recipe(recipe).get("data", {}).get("pairs")
    if pairs is not None:
        folder = pairs["path"]
        command = [sys.executable, "-m", "flowrl", "pairs", *PAIRS[folder], "--out", folder, "--processes", "2"]
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


def run_cell(name: str, recipe: Path, seed: int, now: Fingerprints) -> dict[str, Any]:
    """Train one cell, or go on with it where the same recipe and code were interrupted."""
    command, folder = train_command(name, recipe, seed, RUNS)
    mark = folder / "lab.json"
    if mark.is_file() and _read(mark) == asdict(now):
        command.append("--resume")
    elif folder.is_dir():
        # Resuming would mix the numbers of two recipes or codes, or hand out a finished run's old ones as new.
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(asdict(now)) + "\n", encoding="utf-8")
    make_pairs(recipe)
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    return asdict(now) | measured(folder)


def replay(name: str, recipe: Path, seed: int) -> dict[str, Any]:
    """Base accuracy and first metrics of a recipe as the code is now.

    The unchanged recipe is started and stopped by a signal, since a smaller `iterations` would change what depends on
    it, such as a linear learning rate.
    """
    make_pairs(recipe)
    with tempfile.TemporaryDirectory(prefix="flowrl-lab-") as output:
        command, folder = train_command(name, recipe, seed, Path(output))
        print(" ".join(command), f"(until iteration {REPLAYED})", flush=True)
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            while process.poll() is None and len(first_rows(folder)) < REPLAYED:
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGTERM)  # does nothing to a process that has ended
            code = process.wait()
        if code not in (0, 128 + signal.SIGTERM) or len(first_rows(folder)) < REPLAYED:
            raise SystemExit(f"the replay of {name} seed {seed} ended with code {code} before iteration {REPLAYED}")
        summary, facts = _read(folder / "summary.json"), _read(folder / "provenance.json")
        base = {key: summary[key] for key in ("base", "base_best_guidance")}
        return base | {"rows": first_rows(folder), "machine": machine(facts), "commit": facts["commit"]}


# ---- comparing


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{prefix} {key}".strip()).items()}


def differences(cell: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """Numbers of a cell that its replay does not repeat; none: the same.

    Held-out means and intervals must agree to 1e-6, metrics to a relative 1e-5. A metric that is new is no difference.
    """
    recorded = cell["replay"]["rows"]
    if len(recorded) < REPLAYED:
        return [f"only {len(recorded)} iterations recorded"]
    bases = [
        _flat({key: source[key] for key in ("base", "base_best_guidance")}) for source in (cell["summary"], replayed)
    ]
    parts = [("", *bases, {"abs_tol": 1e-6, "rel_tol": 0.0})]
    for old, new in zip(recorded, replayed["rows"], strict=True):
        parts.append((f"iteration {old['iteration']} ", old, new, {"rel_tol": 1e-5}))
    result = []
    for place, old, new, tolerance in parts:
        for key, value in old.items():
            other = new.get(key, "missing")
            numbers = all(isinstance(v, int | float) for v in (value, other))
            if not (math.isclose(value, other, **tolerance) if numbers else value == other):
                result.append(f"{place}{key}: {value} recorded, {other} now")
    return result


def check_recipe(name: str, recipe: Path, results: dict[str, Any], seeds: list[int]) -> bool:
    """Replay a recipe whose cells are stale by their code; make them fresh where every number is the same."""
    now, same = fingerprints(recipe), True
    groups: dict[str, list[int]] = {}
    for seed in seeds:
        cell = results.get(f"{name}/{seed}")
        verdict = state(cell, now)
        if verdict == "stale: code":
            # A replay speaks for the code that its cell was measured with, and for no other.
            groups.setdefault(cell["code"], []).append(seed)
        elif verdict == "stale: recipe":
            print(f"{name} seed {seed}: the recipe or its model changed, which no replay mends; use --stale")
            same = False
    for members in groups.values():
        cell = results[f"{name}/{members[0]}"]
        replayed = replay(name, recipe, members[0])
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


def write_results(results: dict[str, Any], file: Path | None = None) -> None:
    """One cell to a line: short, and two branches that add cells merge."""
    file = file or RESULTS
    lines = (f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in results.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_page(results: dict[str, Any]) -> None:
    entries = []
    for name, recipe in recipes().items():
        tree, now = read_recipe(recipe), fingerprints(recipe)
        source = ROOT / "flowrl" / "algorithms" / f"{tree['algorithm']['name']}.py"
        level = re.search(r'^LEVEL = "(\w+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
        cells = {seed: results.get(f"{name}/{seed}") for seed in SEEDS}
        entries.append(
            Entry(
                name=name,
                level=level[1] if level else "experimental",
                searched=bool(tree["eval"].get("best_guidance")),
                cells=cells,
                states={seed: state(cell, now) for seed, cell in cells.items()},
                sized={entry["name"] for entry in tree.get("rewards", [])} == {"jpeg"},
                preferring=tree["algorithm"]["name"] in PREFERRING,
            )
        )
    notes = ROOT / "docs" / "lab" / "notes.md"
    text = notes.read_text(encoding="utf-8") if notes.is_file() else ""
    PAGE.write_text(page(entries, text), encoding="utf-8")
    print(PAGE)


def run_missing(chosen: dict[str, Path], results: dict[str, Any], seeds: Iterable[int], *, stale: bool) -> None:
    """Run the cells that were not, and the stale ones if asked to; each is kept as soon as it is there."""
    for name, recipe in chosen.items():
        for seed in seeds:
            key, now = f"{name}/{seed}", fingerprints(recipe)
            verdict = state(results.get(key), now)
            if verdict == "not run" or (stale and verdict.startswith("stale")):
                results[key] = run_cell(name, recipe, seed, now)
                write_results(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="default: all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="only write the page")
    what.add_argument("--check", action="store_true", help="replay stale recipes and compare; 1 if any stays stale")
    what.add_argument("--stale", action="store_true", help="run stale cells again")
    what.add_argument("--flat", action="store_true", help="only print the bytes of a flat picture")
    args = parser.parse_args()
    if args.flat:
        print(f"{1000 * flat_kilobytes():.0f}")
        return
    unknown = sorted(set(args.names) - recipes().keys())
    if unknown:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(recipes())}")
    results, same = _read(RESULTS) if RESULTS.is_file() else {}, True
    chosen = {name: recipe for name, recipe in recipes().items() if not args.names or name in args.names}
    if args.check:
        try:
            same = all([check_recipe(name, recipe, results, list(args.seeds)) for name, recipe in chosen.items()])
        finally:
            # Not after each recipe: the file would be an uncommitted change in the next one's provenance.
            write_results(results)
    elif not args.write:
        run_missing(chosen, results, args.seeds, stale=args.stale)
    write_page(results)
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
