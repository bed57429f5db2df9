"""Run the lab: every recipe of configs/lab (and the quickstart) on seeds 0 to 2, and write docs/lab.md.

    python scripts/lab.py                 run missing cells, then write the page
    python scripts/lab.py --write         only write the page
    python scripts/lab.py --stale         run stale cells too
    python scripts/lab.py quickstart      only these recipes

A cell is one recipe and seed; its result is kept in docs/lab/results.json with a fingerprint of the recipe,
the model and the code that can change a number. A cell whose fingerprint differs is marked stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "lab" / "results.json"
PAGE = ROOT / "docs" / "lab.md"
RUNS = ROOT / "runs" / "lab"
SEEDS = (0, 1, 2)
# What can change a number; messages, the gallery and the like cannot.
NUMERIC = (
    *(f"flowrl/{folder}/*.py" for folder in ("samplers", "algorithms", "models")),
    *(f"flowrl/{name}.py" for name in ("advantages", "buffer", "evaluate", "learner", "objectives", "optim", "plan")),
    *(f"flowrl/{name}.py" for name in ("process", "prompts", "reward", "rng", "rollout", "schedules", "shapes")),
    "rewards/shapes.py",
    "assets/tiny-sd3/**/*.safetensors",
)


def recipes() -> dict[str, Path]:
    """Name -> file, the quickstart first."""
    found = {"quickstart": ROOT / "configs" / "quickstart.yaml"}
    return found | {file.stem: file for file in sorted((ROOT / "configs" / "lab").glob("*.yaml"))}


def fingerprint(recipe: Path) -> str:
    digest = hashlib.sha256(recipe.read_bytes())
    for pattern in NUMERIC:
        for file in sorted(ROOT.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cell(name: str, recipe: Path, seed: int) -> dict:
    """Train one cell in two processes and return its summary."""
    run = f"{name}-seed{seed}"
    command = [sys.executable, "-m", "flowrl", "train", str(recipe), f"name={run}", f"output={RUNS}", f"seed={seed}"]
    print(" ".join(command), flush=True)
    if (RUNS / run / "config.yaml").is_file():
        command.append("--resume")
    subprocess.run([*command, "--processes", "2"], cwd=ROOT, check=True)
    summary = json.loads((RUNS / run / "summary.json").read_text(encoding="utf-8"))
    return {key: summary[key] for key in ("seconds", "iterations", "base", "base_best_guidance", "tuned", "difference")}


def percent(value: dict, sign: str = "") -> str:
    mean, low, high = (format(100 * value[name], f"{sign}.1f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def page(results: dict) -> str:
    """docs/lab.md."""
    lines = [
        "# The lab",
        "",
        "Written by `python scripts/lab.py`; do not edit. Strict accuracy (`shapes_strict`) in per cent on the 512",
        "held-out captions x 2 fixed seeds, ODE sampler, 95 % bootstrap interval over captions, paired differences.",
        "Two single-thread processes on two CPU cores; seconds include both evaluations and the search for the base's",
        "best CFG. A stale cell was measured with an older recipe, model or numerics.",
        "",
        "| recipe | seed | base | base, best CFG | tuned | difference | seconds | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, recipe in recipes().items():
        for seed in SEEDS:
            cell = results.get(f"{name}/{seed}")
            if cell is None:
                lines.append(f"| {name} | {seed} | | | | | | not run |")
                continue
            values = cell["summary"]
            metric = "shapes_strict"
            rival = values["base_best_guidance"]
            scale = rival["guidance_scale"]
            lines.append(
                f"| {name} | {seed} | {percent(values['base'][metric])} "
                f"| {percent(rival[metric])} at {scale:g} | {percent(values['tuned'][metric])} "
                f"| {percent(values['difference'][metric], '+')} | {values['seconds']:.0f} "
                f"| {'' if cell['fingerprint'] == fingerprint(recipe) else 'stale'} |"
            )
    notes = ROOT / "docs" / "lab" / "notes.md"
    return "\n".join(lines) + "\n" + ("\n" + notes.read_text(encoding="utf-8") if notes.is_file() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--stale", action="store_true", help="run stale cells again")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name, recipe in recipes().items():
        if args.write or (args.names and name not in args.names):
            continue
        for seed in SEEDS:
            cell, now = results.get(f"{name}/{seed}"), fingerprint(recipe)
            if cell is not None and (cell["fingerprint"] == now or not args.stale):
                continue
            results[f"{name}/{seed}"] = {"fingerprint": now, "summary": run_cell(name, recipe, seed)}
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
