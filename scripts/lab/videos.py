"""The lab's recipes on videos: how many seeds each has, and their section of the page."""

from __future__ import annotations

import statistics
from typing import Any

from flowrl.commands.plan import step_plan, transition_std
from flowrl.config.load import load_config, resolve
from flowrl.planning.memory import skeleton
from scripts.lab.page import MOTION, Entry, percent, row, summary_table, table, wins
from scripts.lab.recipes import ROOT

SEEDS = (0, 1, 2)
SAMPLED = "video-sage_grpo"
"""The recipe of SAGE-GRPO; those of the other samplers have its name with theirs at the end."""
FLICKER = "shapes_motion_flicker"
TEXT = """\
The methods on videos: `assets/tiny-wan`, 9 frames of 32 x 32. Strict accuracy (`shapes_motion_strict`) in per cent on
the {captions} held-out captions of `shapes:motion-heldout`, one fixed seed each, ODE sampler without CFG; the rest as
above.

![nine frames of base and tuned videos for one caption of each task](lab/videos.png)

`video-sage_grpo`, seed 0, base above tuned; green is right, red wrong. Of each task among the captions of [the report
of this run](lab/video_report/index.html): the first caption that the tuned model alone gets right, or the first one
where there is none; in brackets how many of all captions of the task each model gets right (`python -m scripts.pages
video-report` makes both).
"""
SAMPLERS = """\
SAGE-GRPO's recipe with other kinds of noise, and so with equal network evaluations: seed 0, nothing else changed. *Std*
is the mean of the noise that one step adds, over the trained steps. It is that of SAGE for the samplers that have a
strength to set; `wan_sde` has none, and its own noise is weaker. *Flicker* (`shapes_motion_flicker`, less is better) is
the change between frames that no asked motion explains, in thousandths. *Drawn* is the mean over the samples that the
first {rows} iterations learn from, whose noise the sampler has added; base and tuned are held-out videos of the ODE
sampler, and the last column is their paired difference. One seed each: gains of two seeds of one recipe differ as much.
"""


def seeds_of(name: str) -> tuple[int, ...]:
    """Seeds that a recipe is measured on: GRPO-Guard, BranchGRPO and the other samplers have one on videos."""
    once = name in ("video-grpo_guard", "video-branch_grpo") or name.startswith(f"{SAMPLED}-")
    return SEEDS[:1] if once else SEEDS


def videos_section(entries: list[Entry]) -> list[str]:
    """Lines on the recipes whose model makes videos: over their seeds, by sampler, wins of those that prefer."""
    measured = [entry for entry in entries if entry.summaries]
    if not measured:
        return []
    captions = measured[0].summaries[0]["base"][MOTION]["n"]
    lines = ["", "## Videos", "", TEXT.format(captions=captions), *summary_table(entries)]
    lines += _samplers([entry for entry in measured if entry.name.startswith(SAMPLED)])
    preferring = wins([entry for entry in measured if entry.preferring])
    return lines + (["", "### Win rate on videos", "", *preferring] if preferring else [])


def _samplers(entries: list[Entry]) -> list[str]:
    """Lines on the same recipe with other samplers."""
    cells = {entry.name: entry.cells[0] for entry in entries if entry.cells[0] is not None}
    if len(cells) < 2:
        return []
    rows = min(len(cell["start"]) for cell in cells.values())
    lines = ["", "### Noise of the samplers", "", SAMPLERS.format(rows=rows)]
    lines += table("sampler", "std", "gain, points", "evaluations", "flicker, drawn", "base", "tuned", "change")
    return lines + [_sampler_row(name, cell) for name, cell in cells.items()]


def trained_std(name: str) -> float:
    """Mean std of the noise of a recipe's trained steps."""
    run = resolve(load_config(ROOT / "configs" / "lab" / f"{name}.yaml"))
    adapter = skeleton(run)
    plan = step_plan(run, adapter)
    stds = transition_std(run, adapter, plan)
    return statistics.mean(stds[k] for k in plan.train)


def _sampler_row(name: str, cell: dict[str, Any]) -> str:
    values = cell["summary"]
    drawn = statistics.mean(metrics[f"reward/{FLICKER}_mean"] for metrics in cell["start"])
    change = {key: 10 * values["difference"][FLICKER][key] for key in ("mean", "low", "high")}
    return row(
        f"`{name.removeprefix(SAMPLED).removeprefix('-') or 'sage'}`",
        f"{trained_std(name):.2f}",
        percent(values["difference"][MOTION], "+"),
        " + ".join(f"{values['evaluations'][part]:.2f}" for part in ("rollout", "train")),
        f"{1000 * drawn:.1f}",
        *(f"{1000 * values[when][FLICKER]['mean']:.1f}" for when in ("base", "tuned")),
        percent(change, "+"),
    )
