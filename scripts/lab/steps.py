"""The quickstart at other numbers of steps than it trains with: base, tuned model and gain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import difference, summary
from scripts.lab.page import METRIC, commit_name, percent, row, table
from scripts.lab.recipes import read_recipe
from scripts.lab.runs import RUNS, Failed, attend, cell_run, code_now, origin, read

STEPS = (6, 10, 20)
TEXT = """\
Seed 0 of the quickstart, which trains and evaluates at {own} steps, on the same captions and seeds at others:
`python -m scripts.lab --steps`{commit}. The tuned model is of a run of its own: on another
processor than the cell's, its row at {own} steps differs from the cell by what rounding makes of a whole training.
"""


def measure(recipe: Path) -> dict[str, Any]:
    """Base and tuned model of the quickstart's run folder, at every number of steps.

    Raises:
        Failed: the run folder is not of the recipe and the code as they are, or an evaluation failed.
    """
    run, own = cell_run("quickstart", recipe, 0), read_recipe(recipe)["eval"]["num_inference_steps"]
    folder, again = RUNS / run.name, "python -m scripts.lab quickstart --again --seeds 0"
    mark, status = folder / "lab.json", folder / "summary.json"
    of_now = mark.is_file() and run.mark(code_now()).items() <= read(mark).items()
    if not of_now or read(status)["status"] != "finished":
        raise Failed(f"{folder} holds no finished run of this recipe and code: {again}")
    rows = []
    for steps in STEPS:
        both = [folder / "eval" / f"{tag}.json" for tag in ("base", "tuned")]
        if steps != own:
            both = [_evaluate(target, steps, folder / f"steps-{steps}" / target.stem) for target in (recipe, folder)]
        base, tuned = map(Evaluation.load, both)
        values = {"base": summary(base), "tuned": summary(tuned), "difference": difference(base, tuned)}
        rows.append({"steps": steps} | {name: value[METRIC] for name, value in values.items()})
    return origin(folder) | {"own": own, "rows": rows}


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


def steps_section(kept: dict[str, Any]) -> list[str]:
    """Lines on the quickstart at other numbers of steps."""
    if not kept:
        return []
    commit = f", at commit {commit_name(kept['commit'])}" if kept["commit"] else ""
    lines = ["", "## The quickstart at more steps", "", TEXT.format(own=kept["own"], commit=commit)]
    lines += table("steps", "base", "tuned", "gain")
    for values in kept["rows"]:
        shown = [percent(values[name]) for name in ("base", "tuned")]
        lines.append(row(values["steps"], *shown, percent(values["difference"], "+")))
    return lines
