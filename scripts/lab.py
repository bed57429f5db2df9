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

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "lab" / "results.json"
PAGE = ROOT / "docs" / "lab.md"
RUNS = ROOT / "runs" / "lab"
SEEDS = (0, 1, 2)
# What can change a number of every recipe; messages, the gallery and the like cannot.
NUMERIC = (
    *(f"flowrl/{name}.py" for name in ("advantages", "buffer", "evaluate", "learner", "objectives", "optim", "plan")),
    *(f"flowrl/{name}.py" for name in ("process", "prompts", "reward", "rng", "rollout", "schedules", "selection")),
    *(f"flowrl/{name}.py" for name in ("shapes", "solvers")),
    *(f"flowrl/models/{name}.py" for name in ("base", "sd3", "weights")),
    *(f"flowrl/{folder}/base.py" for folder in ("samplers", "algorithms")),
    "flowrl/samplers/ode.py",
    "rewards/shapes.py",
    "assets/tiny-sd3/**/*.safetensors",
)


def recipes() -> dict[str, Path]:
    """Name -> file, the quickstart first."""
    found = {"quickstart": ROOT / "configs" / "quickstart.yaml"}
    return found | {file.stem: file for file in sorted((ROOT / "configs" / "lab").glob("*.yaml"))}


def fingerprint(recipe: Path) -> str:
    """Of the recipe, the model, the shared code, and the recipe's own sampler and algorithm."""
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    sampler, algorithm = tree["rollout"]["sampler"]["name"], tree["algorithm"]["name"]
    own = ("flowrl/algorithms/_*.py", f"flowrl/samplers/{sampler}.py", f"flowrl/algorithms/{algorithm}.py")
    for pattern in (*NUMERIC, *own):
        for file in sorted(ROOT.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_cell(name: str, recipe: Path, seed: int) -> dict:
    """Train one cell in two processes; its summary, network evaluations per sample, and commit."""
    run = f"{name}-seed{seed}"
    command = [sys.executable, "-m", "flowrl", "train", str(recipe), f"name={run}", f"output={RUNS}", f"seed={seed}"]
    print(" ".join(command), flush=True)
    if (RUNS / run / "config.yaml").is_file():
        command.append("--resume")
    subprocess.run([*command, "--processes", "2"], cwd=ROOT, check=True)
    summary = json.loads((RUNS / run / "summary.json").read_text(encoding="utf-8"))
    kept = ("seconds", "iterations", "base", "base_best_guidance", "tuned", "difference")
    rows = [json.loads(line) for line in (RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = {part: sum(row[f"nfe/{part}"] for row in rows) / len(rows) for part in ("rollout", "train")}
    commit = json.loads((RUNS / run / "provenance.json").read_text(encoding="utf-8"))["commit"]
    return {key: summary[key] for key in kept} | {"evaluations": evaluations, "commit": commit}


def percent(value: dict, sign: str = "") -> str:
    mean, low, high = (format(100 * value[name], f"{sign}.1f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def line(head: str, cell: dict, *, stale: bool, searched: bool, metric: str = "shapes_strict") -> str:
    """A row of the table; `searched` says whether the recipe looks for the base's best CFG."""
    values = cell["summary"]
    rival, spent = values["base_best_guidance"], values["evaluations"]
    columns = (
        head,
        percent(values["base"][metric]),
        f"{percent(rival[metric])} at {rival['guidance_scale']:g}" if searched else "not searched",
        percent(values["tuned"][metric]),
        percent(values["difference"][metric], "+"),
        f"{spent['rollout']:.2f} + {spent['train']:.2f}",
        f"{values['seconds']:.0f}",
        f"`{cell['fingerprint'][:8]}`" + (" stale" if stale else ""),
        f"`{values['commit'][:8]}`",
    )
    return "| " + " | ".join(columns) + " |"


def page(results: dict) -> str:
    """docs/lab.md."""
    lines = [
        "# The lab",
        "",
        "Written by `python scripts/lab.py`; do not edit. Strict accuracy (`shapes_strict`) in per cent on the 512",
        "held-out captions x 2 fixed seeds, ODE sampler, 95 % bootstrap interval over captions, paired differences.",
        "Two single-thread processes on two CPU cores; seconds include both evaluations and the search for the base's",
        "best CFG. Network evaluations are counted per rolled-out sample, in sampling and in updates. The fingerprint",
        "is of the recipe, the model and the code; a stale cell was measured with older ones.",
        "",
        "| recipe | seed | base | base, best CFG | tuned | difference | evaluations | seconds | fingerprint | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, recipe in recipes().items():
        searched = bool(yaml.safe_load(recipe.read_text(encoding="utf-8"))["eval"].get("best_guidance"))
        for seed in SEEDS:
            cell = results.get(f"{name}/{seed}")
            if cell is None:
                lines.append(f"| {name} | {seed} | | | | | | | | not run |")
            else:
                stale = cell["fingerprint"] != fingerprint(recipe)
                lines.append(line(f"{name} | {seed}", cell, stale=stale, searched=searched))
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
