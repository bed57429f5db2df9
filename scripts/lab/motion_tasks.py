"""What each task of the captions on motion gains: strict accuracy of a run's base and tuned videos, by task.

    python -m scripts.lab motion-tasks runs/video-awm-seed0 runs/video-sage_grpo-seed0

A Markdown table: the base of the first run, then a row for each run. All runs must have evaluated the same captions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl import moving_shapes
from flowrl.evaluation.results import Evaluation
from scripts.lab.page import row, table

METRIC = "shapes_motion_strict"


def by_task(evaluation: Evaluation) -> dict[str, float]:
    """Strict accuracy of each task that the captions have, in per cent, in the order of `moving_shapes.TASKS`."""
    tasks = np.asarray([moving_shapes.parse(prompt).task for prompt in evaluation.prompts])
    means = evaluation.scores[METRIC].mean(axis=1)
    return {task: 100 * float(means[tasks == task].mean()) for task in moving_shapes.TASKS if (tasks == task).any()}


def lines_of(runs: Sequence[Path]) -> list[str]:
    """Lines of the table.

    Raises:
        SystemExit: a run without a final evaluation, or of other captions than the first.
    """
    found = [(run.name, *(_read(run, tag) for tag in ("base", "tuned"))) for run in runs]
    captions = found[0][1].prompts
    other = next((name for name, base, tuned in found if not base.prompts == tuned.prompts == captions), None)
    if other is not None:
        raise SystemExit(f"{other} has evaluated other captions than {found[0][0]}")
    tasks = [moving_shapes.parse(prompt).task for prompt in captions]
    base = by_task(found[0][1])
    lines = table("run", *(f"{task} ({tasks.count(task)})" for task in base))
    rows = {"base": base} | {name: by_task(tuned) for name, _, tuned in found}
    return lines + [row(name, *(f"{value:.0f}" for value in values.values())) for name, values in rows.items()]


def _read(run: Path, tag: str) -> Evaluation:
    file = run / "eval" / f"{tag}.json"
    if not file.is_file():
        raise SystemExit(f"{run} is not a finished run: it has no eval/{tag}.json")
    return Evaluation.load(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs on videos of shapes")
    print("\n".join(lines_of(parser.parse_args().runs)))
    return 0
