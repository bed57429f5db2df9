"""`flowrl eval --suite NAME --base RIVAL --pair-judge JUDGE`: a judge that sees both models' images at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands._arguments import reward_entries

if TYPE_CHECKING:
    from flowrl.apps.suites.running.folder import ResultsFolder
    from flowrl.apps.suites.running.runner import Task
    from flowrl.scoring.entries import RewardPlan


def pair_plan(judge: str | None, settings: Sequence[str], base: str | None) -> RewardPlan | None:
    """The entry of --pair-judge, checked before anything is made; None: there is none.

    Raises:
        ConfigError: no --base to compare with, settings without a judge, or a bad option.
    """
    from flowrl.core.errors import ConfigError, Remedy
    from flowrl.scoring.entries import check_plans, reward_plan

    if judge is None:
        if settings:
            raise ConfigError(
                f"--pair-set {settings[0]}: it is an option of a --pair-judge", remedies=[Remedy(without="--pair-set")]
            )
        return None
    if base is None:
        raise ConfigError(
            f"--pair-judge {judge}: pairs have images of two models, and no --base names the other",
            remedies=[Remedy(without="--pair-judge --pair-set" if settings else "--pair-judge")],
        )
    (tree,) = reward_entries([judge], settings, prefixes=False).values()
    if judge == "vlm_judge":
        tree = {"rubric": "preference"} | tree
    plan = reward_plan(tree, f"--pair-judge {judge}")
    check_plans([(f"--pair-judge {judge}", plan)])
    return plan


def compared(
    plan: RewardPlan | None, task: Task, folders: Mapping[str, ResultsFolder], out: Path, *, rejudge: bool
) -> tuple[dict[str, Any] | None, str]:
    """(plain result, section of table.md) of the pairs; (None, "") without a judge of pairs.

    Raises:
        RewardFailure: the judge is away; what was judged is kept.
    """
    if plan is None:
        return None, ""
    from flowrl.apps.suites.running import pairs
    from flowrl.display.phases import phase

    with phase("loading"):
        judge = pairs.PairJudge(plan)
    found = pairs.summary(pairs.compare_folders(task, folders, judge, out, rejudge=rejudge))
    return {**found, "judge": judge.facts}, pairs.text(found, plan.label)


def image_change(task: Task, folders: Mapping[str, ResultsFolder]) -> str:
    """How far the model's first images of the prompts are from the base's, in a sentence; "" without a base."""
    from flowrl.evaluation import moved

    if "base" not in folders:
        return ""
    files = ((folders["base"].image(item, 0), folders["model"].image(item, 0)) for item in task.items)
    return moved.sentence(moved.measure(pair for pair in files if all(file.is_file() for file in pair)))
