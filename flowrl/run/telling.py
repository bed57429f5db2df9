"""What a run tells the display (`display`)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.config.schema import EvalConfig
from flowrl.display import display
from flowrl.display.board import Scores
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.held_out import RunPrompts
from flowrl.evaluation.results import Evaluation


def planned(evaluator: Evaluator, options: EvalConfig, iterations: int, search: int = 0) -> Callable[[int], int]:
    """Images of the evaluations that follow an iteration of a run, as far as this process draws them.

    `search`: those of the search for the best guidance, at the end.
    """
    samples, size = evaluator.options.samples_per_prompt, evaluator.world.size
    during, final = (len(evaluator.prompts[:limit]) * samples // size for limit in (options.periodic_prompts, None))

    def coming(iteration: int) -> int:
        many = (iterations - 1) // options.every - iteration // options.every if options.every else 0
        return max(many, 0) * during + final + search

    return coming


def tell(result: Evaluation, prompts: RunPrompts, drawn: int, seconds: float) -> None:
    """An evaluation is done; those of the trained network and its base make the held-out curve.

    `drawn`: images that this process drew for it; `seconds`: with trees and preview prompts.
    """
    means = {name: float(np.nanmean(table)) for name, table in result.scores.items() if np.isfinite(table).any()}
    facts: dict[str, Any] = {"tag": result.tag, "iteration": result.iteration, "prompts": len(result.prompts)}
    facts |= {"seeds": result.seeds, "guidance_scale": result.guidance_scale, "scores": means}
    facts["seconds"] = round(seconds, 3)
    first = next(iter(means), None)
    if result.agreement is not None:
        facts["implicit_accuracy"] = result.agreement.mean()
    alike = (result.prompts, result.seeds, result.guidance_scale, first)
    on_curve = first is not None and not {"search", "guidance"} & set(result.tag.split("-"))
    scores = Scores(alike, metric_name(prompts, first), means[first]) if first is not None and on_curve else None
    shown = display.current()
    shown.board.add_evaluation(scores, drawn, facts["seconds"])
    shown.send("evaluation", **facts)


def metric_name(prompts: RunPrompts, metric: str) -> str:
    """A metric with the prompts it is measured on."""
    return f"{metric}{prompts.on}" if prompts.on else f"held-out {metric}"
