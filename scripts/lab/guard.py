"""The guard in the lab: does it stop the runs that hack their reward, and leave the healthy ones alone?

    python -m scripts.lab guard                             run missing cells; write the table of docs/watching/guard.md
    python -m scripts.lab guard --write                     only write the table
    python -m scripts.lab guard NAME ... --seeds 0          only these recipes and seeds
    python -m scripts.lab guard --again NAME ... --seeds 0  run them anew

Three kinds of cells, all with guard.mode=stop. `hacking`: the compressibility and incompressibility recipes on seeds 0
to 2, watching strict accuracy. `healthy`: six recipes on seed 0, watching the cosine of tiny-clip, which they do not
train on. `proxy`: the recipes of configs/proxy on seeds 0 to 2, watching strict accuracy, reported as it is.

A cell is kept in docs/lab/guard.json with commit, date and processor; runs are where the lab's are. As the lab, it can
be stopped at any time, and the same command goes on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import difference
from flowrl.run.status import ENDED
from scripts.lab.cells import Job, load, run_missing
from scripts.lab.recipes import ROOT
from scripts.lab.runs import RUNS, Failed, Run, code_now, costs, origin, read, train, write

NUMBERS, PAGE = ROOT / "docs" / "lab" / "guard.json", ROOT / "docs" / "watching" / "guard.md"
LAB, PROXY = ROOT / "configs" / "lab", ROOT / "configs" / "proxy"
GOLD, COSINE = "shapes_strict", "clip_cos"
EVERY = "eval.every=10"
HACKING = tuple(f"{model}ddpo-{way}" for model in ("", "sd-") for way in ("compressibility", "incompressibility"))
HEALTHY = ("flow_grpo", "ddpo", "awm", "diffusion_nft", "dgpo", "crd")
PROXIES = ("flow_grpo", "flow_grpo_kl", "grpo_guard", "multi_reward")
SEEDS = (0, 1, 2)
STOP = "guard.mode=stop"
WORDS = {
    "hacking": (STOP, f"guard.metric={GOLD}", EVERY, "eval.periodic_prompts=128"),
    "healthy": (
        *(STOP, f"guard.metric={COSINE}", EVERY, "eval.periodic_prompts=128"),
        "eval.rewards=[{name: clip_score, model: tiny-clip}]",
    ),
    "proxy": (STOP, f"guard.metric={GOLD}"),
}
"""Kind -> overrides of its recipes."""


def runs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, Run]]:
    """(key, kind, run) of every cell; none of `names`: all recipes."""
    listed = [("hacking", LAB, name, SEEDS) for name in HACKING]
    listed += [("healthy", LAB, name, SEEDS[:1]) for name in HEALTHY]
    listed += [("proxy", PROXY, name, SEEDS) for name in PROXIES]
    for kind, folder, name, own in listed:
        for seed in own:
            if seed in seeds and (not names or name in names or f"{kind}/{name}" in names):
                run = Run(f"guard-{kind}-{name}-seed{seed}", folder / f"{name}.yaml", seed, WORDS[kind])
                yield f"{kind}/{name}/{seed}", kind, run


def run_cell(run: Run) -> dict[str, Any]:
    """Where it comes from, what the guard did, and the paired differences that it could see.

    Raises:
        Failed: the run did not finish.
    """
    folder = RUNS / run.name
    mark, status = folder / "lab.json", folder / "summary.json"
    done = mark.is_file() and status.is_file() and run.mark(code_now()).items() <= read(mark).items()
    if not (done and read(status)["status"] in ENDED):
        folder, code = train(run)
        if code:
            raise Failed(f"it ended with code {code}; {folder / 'train.log'} says why")
    summary = read(folder / "summary.json")
    guard = summary["guard"]
    kept = {key: summary[key] for key in ("status", "iterations", "seconds")} | costs(folder)
    facts = {
        key: guard.get(key) for key in ("metric", "prompts", "ended", "taken", "alarm", "sentence", "best", "looks")
    }
    return origin(folder) | {"summary": kept, "guard": facts, "curve": curve(folder, guard["metric"])}


def curve(folder: Path, metric: str) -> list[dict[str, float]]:
    """Paired differences from the base of every evaluation during training, on all of its prompts."""
    base, rows = Evaluation.load(folder / "eval" / "base.json"), []
    for file in sorted((folder / "eval").glob("iteration-*.json")):
        now = Evaluation.load(file)
        first = base.of(np.arange(len(base.prompts)) < len(now.prompts))
        rows.append({"iteration": now.iteration} | difference(first, now)[metric])
    return rows


# ---- the table


def first_loss(cell: dict[str, Any]) -> int | None:
    """Iteration of the first evaluation whose interval lies wholly below the base; None: there is none."""
    return next((int(row["iteration"]) for row in cell["curve"] if row["high"] < 0), None)


def late(cell: dict[str, Any]) -> int | None:
    """Evaluations from the first loss to the stop; None: without a loss, or without a stop after one."""
    loss, ended = first_loss(cell), cell["guard"]["ended"]
    if loss is None or ended is None or ended < loss:
        return None
    return sum(loss < row["iteration"] <= ended for row in cell["curve"])


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Markdown of all cells, and a sentence for each kind."""
    lines = [
        "| kind, recipe, seed | watched | first loss | stopped | evaluations later | first alarm | difference there |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, cell in cells.items():
        guard, last = cell["guard"], cell["curve"][-1]
        change = f"{last['mean']:+.3f} ({last['low']:+.3f} to {last['high']:+.3f})"
        after = late(cell)
        shown = [key, guard["metric"], first_loss(cell) or "none", guard["ended"] or "never"]
        shown += ["" if after is None else after, guard["alarm"] or "", change]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    told = []
    for kind in WORDS:
        own = [cell for key, cell in cells.items() if key.startswith(f"{kind}/")]
        stopped = sum(cell["guard"]["ended"] is not None for cell in own)
        soon = sum(cell["guard"]["ended"] is not None and (late(cell) or 0) <= 2 for cell in own)
        told.append(
            f"{kind}: {len(own)} runs, {stopped} stopped, {soon} of them within two evaluations of the first loss"
        )
    return "\n".join([*lines, "", "; ".join(told) + "."])


def write_page(cells: dict[str, dict[str, Any]]) -> None:
    """Put the table between its marks in docs/watching/guard.md."""
    marked = f"<!-- guard_lab -->\n{table(cells)}\n<!-- end of guard_lab -->"
    text, found = re.subn(
        r"<!-- guard_lab -->.*<!-- end of guard_lab -->",
        lambda match: marked,
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if not found:
        raise SystemExit(f"{PAGE} has no marks <!-- guard_lab --> for the table")
    write(PAGE, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes, or kind/recipe; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="only write the table")
    what.add_argument("--again", action="store_true", help="run the named recipes anew")
    options = parser.parse_args()
    if options.again and not options.names:
        parser.error("--again wants the names of recipes")
    done = True
    if not options.write:
        jobs: list[Job] = [(key, partial(run_cell, run)) for key, _, run in runs(options.names, options.seeds)]
        done = run_missing(jobs, NUMBERS, again=options.again)
    write_page(load(NUMBERS))
    return 0 if done else 1
