"""What a run tells the display (`core.display`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.config.schema import EvalConfig
from flowrl.display import display
from flowrl.display.board import Evaluations, Scores
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.held_out import RunPrompts
from flowrl.evaluation.results import Evaluation


def planned(evaluator: Evaluator, options: EvalConfig) -> Evaluations:
    """The evaluations of a run that are to come, as far as this process draws them."""
    samples, size = evaluator.options.samples_per_prompt, evaluator.world.size
    counts = [len(evaluator.prompts[:limit]) * samples // size for limit in (options.periodic_prompts, None)]
    return Evaluations(options.every, *counts)


def tell(result: Evaluation, prompts: RunPrompts, drawn: int, seconds: float) -> None:
    """An evaluation is done; those of the trained network and its base make the held-out curve.

    Args:
        result: the evaluation.
        prompts: those of the run.
        drawn: images that this process drew for it.
        seconds: that it took, with trees and preview prompts.
    """
    if display.current() is None:
        return
    means = {name: float(np.nanmean(table)) for name, table in result.scores.items() if np.isfinite(table).any()}
    facts: dict[str, Any] = {"tag": result.tag, "iteration": result.iteration, "prompts": len(result.prompts)}
    facts |= {"seeds": result.seeds, "guidance_scale": result.guidance_scale, "scores": means}
    facts["seconds"] = round(seconds, 3)
    first = next(iter(means), None)
    if result.agreement is not None:
        facts["implicit_accuracy"] = result.agreement.mean()
    alike = (result.prompts, result.seeds, result.guidance_scale, first)
    on_curve = first is not None and not result.tag.startswith("base-guidance")
    scores = Scores(alike, metric_name(prompts, first), means[first]) if first is not None and on_curve else None
    display.evaluated(scores, drawn, **facts)


def metric_name(prompts: RunPrompts, metric: str) -> str:
    """A metric with the prompts it is measured on."""
    return f"{metric}{prompts.on}" if prompts.on else f"held-out {metric}"
