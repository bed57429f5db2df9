"""Share of an evaluation's time that the copy index by pixels takes, in CPU seconds of one process."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from scripts.bench.page import cpu
from scripts.bench.timing import median_interval, paired


def cost(resolved: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Evaluation -> (ms without the index, with it) of each pair of turns: the first fits its sources, later ones
    have them."""
    from flowrl.evaluation.sources import Sources
    from flowrl.run.session import Session

    session = Session(resolved)
    own = session.parts.evaluator
    kept, without = Sources(session.model), dataclasses.replace(own, sources=None)

    def evaluate(sources: Sources | None) -> None:
        session.evaluate("base", evaluator=dataclasses.replace(own, sources=sources) if sources else without)

    kinds = {"first": lambda: Sources(session.model), "later": lambda: kept}
    turns = {"warmups": 1, "clock": time.process_time}
    return {
        k: paired(lambda: evaluate(None), lambda m=make: evaluate(m()), rounds, **turns) for k, make in kinds.items()
    }


def report(costs: dict[str, list[tuple[float, float]]], recipe: str) -> str:
    """The result as Markdown."""
    lines = ["| evaluation | without, CPU s | with it | ratio (95 % of the median) |", "|---|---|---|---|"]
    for name, rows in costs.items():
        before, after = (statistics.median(row[k] for row in rows) / 1000 for k in (0, 1))
        middle, low, high = median_interval([with_it / without for without, with_it in rows])
        lines.append(f"| {name} | {before:.2f} | {after:.2f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    return "\n".join([*lines, "", f"Medians of {len(rows)} pairs of evaluations of {recipe}, {cpu()}."])
