"""The quickstart at other numbers of steps than it trains with: base, tuned model and gain."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import difference, summary
from scripts.lab.fingerprints import Fingerprints, read_recipe
from scripts.lab.page import METRIC, percent, row, table
from scripts.lab.runs import RUNS, Failed, attend, cell_run, read

STEPS = (6, 10, 20)
TEXT = """\
Seed 0 of the quickstart, which trains and evaluates at {own} steps, on the same captions and seeds at others:
`python -m scripts.lab --steps`. {state} The tuned model is of a run of its own: on another processor than the cell's,
its row at {own} steps differs from the cell by what rounding makes of a whole training.
"""


def measure(recipe: Path, now: Fingerprints) -> dict[str, Any]:
    """Base and tuned model of the quickstart's run folder, at every number of steps.

    Raises:
        Failed: the run folder is not of the recipe and the code as they are, or an evaluation failed.
    """
    folder, own = RUNS / cell_run("quickstart", recipe, 0).name, read_recipe(recipe)["eval"]["num_inference_steps"]
    mark, status = folder / "lab.json", folder / "summary.json"
    if not mark.is_file() or read(status)["status"] != "finished" or not asdict(now).items() <= read(mark).items():
        raise Failed(f"{folder} holds no finished run of this recipe and code: python -m scripts.lab --stale --seeds 0")
    rows = []
    for steps in STEPS:
        both = [folder / "eval" / f"{tag}.json" for tag in ("base", "tuned")]
        if steps != own:
            both = [_evaluate(target, steps, folder / f"steps-{steps}" / target.stem) for target in (recipe, folder)]
        base, tuned = map(Evaluation.load, both)
        values = {"base": summary(base), "tuned": summary(tuned), "difference": difference(base, tuned)}
        rows.append({"steps": steps} | {name: value[METRIC] for name, value in values.items()})
    return asdict(now) | {"own": own, "rows": rows}


def _evaluate(target: Path, steps: int, out: Path) -> Path:
    """Evaluate a recipe's untouched model, or a run folder's tuned one; the file of scores."""
    kept = list((out / "eval").glob("*.json"))
    if kept:  # an earlier call was stopped after it; another code has another run folder
        return kept[0]
    words = [str(target), f"eval.num_inference_steps={steps}", "--out", str(out)]
    print("flowrl eval", *words, flush=True)
    if code := attend([sys.executable, "-m", "flowrl", "eval", *words]):
        raise Failed(f"flowrl eval {' '.join(words)} ended with code {code}")
    (file,) = (out / "eval").glob("*.json")
    return file


def steps_section(kept: dict[str, Any], state: str) -> list[str]:
    """Lines on the quickstart at other numbers of steps."""
    if not kept:
        return []
    lines = ["", "## The quickstart at more steps", "", TEXT.format(own=kept["own"], state=f"State: {state}.")]
    lines += table("steps", "base", "tuned", "gain")
    for values in kept["rows"]:
        shown = [percent(values[name]) for name in ("base", "tuned")]
        lines.append(row(values["steps"], *shown, percent(values["difference"], "+")))
    return lines
