"""docs/lab.md from the lab's cells; `python -m scripts.lab` writes it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from flowrl.statistics.paired import TIE

METRIC = "shapes_strict"
MOTION = "shapes_motion_strict"
EDIT = "edit_strict"
SIZE = "jpeg_kb"
PARTIAL = {METRIC: "shapes_partial", MOTION: "shapes_motion_partial", EDIT: "edit_partial"}
"""Strict accuracy of each world -> its partial score."""
HEAD = """\
# The lab

What do the methods gain, and what do they cost? A recipe of `configs/lab` trains a small model that comes with flowrl,
on a CPU, on seeds 0 to 2; this page has its numbers. Written by `python -m scripts.lab`; do not edit. How models and
recipes were chosen, and what failed, stands in [the notes](lab/notes.md).

Strict accuracy (`shapes_strict`) in per cent on the 512 held-out captions x 2 fixed seeds, ODE sampler, 95 % bootstrap
interval over captions, paired differences. Two single-thread processes on two CPU cores. CPU seconds are those of both
processes, with the start, both evaluations and, where there is one, the search for the base's best CFG; seconds are
those of the clock, without the start, and depend on what else the machine did. Network evaluations are counted per
rolled-out sample, in sampling and in updates. *95 % over seeds* is Student's interval for the mean of the seeds'
differences; *lowest lower end* is that of the seeds' own intervals over captions.
"""
CELLS = """\
A row says which commit it was measured at; `+` after it: with uncommitted changes. `docs/lab/results.json` has its date
and processor too, where they were recorded. The best CFG of base and tuned is chosen on training captions; *old rule*:
the base's alone, on the judged captions. *Diversity* is that of four samples of a caption, at the end less the base's
(`eval.diversity`; `-`: an older cell). Does today's code still give these numbers? `python -m scripts.lab --check`
starts seed 0 of six recipes anew and compares the base's accuracy (to 1e-6) and every metric of the first three
iterations (to a relative 1e-5) with those recorded: evaluation, sampling, reward, credit, loss, gradient and the first
updates. It does not see what shows later: the averaged weights (EMA) that the tuned model is evaluated with, the
learning rate, windows, anchors and caption order after the third iteration, a resumed run.
"""
RACE = """\
Goal: {goal:.1f} per cent, the quickstart's accuracy at its end on the captions of the evaluations during training (the
first 128 held-out ones, two images each), mean of its seeds; its iterations take {whole:.0f} CPU seconds. CPU seconds
here are those of the iterations in both processes (`perf/cpu_s`), without evaluations and the start. A recipe is there
at the first of its evaluations that with the next one is at the goal on average. Listed are the recipes that are
evaluated {many} times or more on the way.
"""
EQUAL = """\
The same runs after equal work: accuracy in per cent on those captions after {spent:.0f} CPU seconds of iterations,
those of the shortest of these runs, between two evaluations in proportion. A learning rate that falls does so to a
run's own end, which is later for the others.
"""
SIZES = """\
These recipes are rewarded for the JPEG size of their images alone, quality 95. Bytes are those above a flat
image's, {flat:.0f} (`python -m scripts.lab --flat`), on the same captions and seeds; the change is the paired
difference over the base's. Strict accuracy is not rewarded: its loss is the cost of such a reward.
"""
WINS = """\
For methods that learn from preferences: of the held-out captions x seeds, the share where the tuned model's {what} has
a higher partial score (`{partial}`) than the base's, among those that are not tied; 95 % bootstrap interval.
The last columns say which scores a cell counted as ties, and how much the {what}s differ from the base's, in levels of
255; a dash: the cell is older than that number.
"""
MANY = 9
"""Evaluations on the way from which a recipe is in the race."""
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe on the page."""

    name: str
    level: str
    """Of its algorithm: tested, verified or experimental."""
    searched: bool
    """Whether the recipe looks for the base's best CFG."""
    cells: dict[int, dict[str, Any] | None]
    """Seed -> cell, None where it was not run."""
    sized: bool = False
    """Rewarded for the size of its images alone, which strict accuracy does not measure."""
    preferring: bool = False
    """Learns from pairs of which one is preferred."""
    metric: str = METRIC
    """Name of the strict accuracy that it is measured by: that of images, videos or edits."""

    @property
    def counted(self) -> dict[int, dict[str, Any]]:
        """Seed -> cell of those that were run."""
        return {seed: cell for seed, cell in self.cells.items() if cell is not None}

    @property
    def curves(self) -> dict[int, Curve]:
        """Seed -> (CPU seconds, accuracy) of base, evaluations on the way and end."""
        kept = {seed: cell["summary"].get("curve") for seed, cell in self.counted.items()}
        return {seed: [(p["cpu_seconds"], p[self.metric]) for p in points] for seed, points in kept.items() if points}

    @property
    def summaries(self) -> list[dict[str, Any]]:
        return [cell["summary"] for cell in self.counted.values()]


def percent(value: dict[str, float], sign: str = "") -> str:
    mean, low, high = (format(100 * value[name], f"{sign}.1f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def commit_name(commit: str | None) -> str:
    """Of a cell's commit; "-" where none was recorded."""
    if commit is None:
        return "-"
    return f"`{commit[:8]}" + ("+`" if "uncommitted" in commit else "`")


def row(*columns: object) -> str:
    return "| " + " | ".join(str(column) for column in columns) + " |"


def table(*titles: str) -> list[str]:
    return [row(*titles), "|" + "---|" * len(titles)]


def cpu_seconds(summaries: list[dict[str, Any]]) -> str:
    """Mean of cells; "-" where one was measured before CPU time was recorded. More parts have cost more starts."""
    known = [values["cpu_seconds"] for values in summaries if "cpu_seconds" in values]
    parts = max(values.get("parts", 1) for values in summaries)
    text = f"{statistics.mean(known):.0f}" if len(known) == len(summaries) else "-"
    return f"{text} (in {parts} parts)" if len(summaries) == 1 and parts > 1 else text


def summary_row(entry: Entry) -> str:
    """A recipe over its seeds."""
    result = entry.summaries
    if not result:
        return row(entry.name, entry.level, *[""] * 6, "not run")
    gains = [values["difference"][entry.metric] for values in result]
    iterations = statistics.mean(values["iterations"] for values in result)
    spent = [sum(v["evaluations"][part] for v in result) / len(result) for part in ("rollout", "train")]
    return row(
        entry.name,
        entry.level,
        f"{100 * sum(gain['mean'] for gain in gains) / len(gains):+.1f}",
        spread([100 * gain["mean"] for gain in gains]),
        f"{100 * min(gain['low'] for gain in gains):+.1f}",
        f"{len(result)} of {len(entry.cells)}",
        f"{iterations:.0f}",
        f"{spent[0]:.2f} + {spent[1]:.2f}",
        cpu_seconds(result),
    )


def at_best(entry: Entry, values: dict) -> str:
    """The difference of tuned and base, each at its best CFG, where the run looked for both."""
    if not entry.searched:
        return "not searched"
    if "guidance_search" not in values:
        return "old rule"
    gain, scale = values["difference_best_guidance"], values["tuned_best_guidance"]["guidance_scale"]
    return f"{percent(gain[entry.metric], '+')} at {scale:g}"


def diversity(summary: dict[str, Any]) -> str:
    """What training changed of the diversity inside a caption, with its interval."""
    change = summary.get("diversity", {}).get("difference")
    return "-" if change is None else f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"


def cell_row(entry: Entry, seed: int) -> str:
    """One seed of a recipe."""
    cell = entry.cells[seed]
    if cell is None:
        return row(entry.name, seed, *[""] * 10, "not run")
    values = cell["summary"]
    rival, spent = values["base_best_guidance"], values["evaluations"]
    return row(
        entry.name,
        seed,
        percent(values["base"][entry.metric]),
        f"{percent(rival[entry.metric])} at {rival['guidance_scale']:g}" if entry.searched else "not searched",
        percent(values["tuned"][entry.metric]),
        percent(values["difference"][entry.metric], "+"),
        at_best(entry, values),
        diversity(values),
        values["iterations"],
        f"{spent['rollout']:.2f} + {spent['train']:.2f}",
        cpu_seconds([values]),
        f"{values['seconds']:.0f}",
        commit_name(cell["commit"]),
    )


def flat_kilobytes() -> float:
    """Thousands of bytes of a grey 32 x 32 image as a JPEG of quality 95; other colours differ by under ten bytes."""
    from flowrl.rewards.jpeg import jpeg_kilobytes

    return jpeg_kilobytes(np.full((32, 32, 3), 128, dtype=np.uint8), quality=95)


def size_row(entry: Entry, seed: int, flat: float) -> str:
    """One seed of a recipe that is rewarded for the size of its images; `flat` in thousands of bytes."""
    cell = entry.cells[seed]
    if cell is None:
        return row(entry.name, entry.level, seed, *[""] * 6, "not run")
    values = cell["summary"]
    base, spent = values["base"][SIZE]["mean"] - flat, values["evaluations"]
    change = {key: values["difference"][SIZE][key] / base for key in ("mean", "low", "high")}
    return row(
        *(entry.name, entry.level, seed),
        *(f"{1000 * (values[when][SIZE]['mean'] - flat):.0f}" for when in ("base", "tuned")),
        percent(change, "+"),
        " to ".join(f"{100 * values[when][METRIC]['mean']:.1f}" for when in ("base", "tuned")),
        values["iterations"],
        f"{spent['rollout']:.2f} + {spent['train']:.2f}",
        cpu_seconds([values]),
    )


def sizes(entries: list[Entry]) -> list[str]:
    """Lines on the recipes that are rewarded for the size of their images."""
    if not entries:
        return []
    flat = flat_kilobytes()
    lines = ["", "## Size of the images", "", SIZES.format(flat=1000 * flat)]
    lines += table(
        *("recipe", "level", "seed", "base, bytes", "tuned, bytes", "change, per cent", "strict accuracy"),
        *("iterations", "evaluations", "CPU seconds"),
    )
    return lines + [size_row(entry, seed, flat) for entry in entries for seed in entry.cells]


def tie_of(result: dict[str, Any]) -> str:
    """Which scores a win rate counted as ties: cells of before `eval.tie` have no margin, and counted equal ones."""
    margin = result.get("margin") or TIE
    return "equal" if margin <= TIE else f"at most {margin:.3g} apart"


def wins(entries: list[Entry]) -> list[str]:
    """Lines on how often the tuned model wins, of recipes of one kind of model that learn from preferences."""
    rows = []
    for entry in entries:
        for seed, cell in entry.cells.items():
            if cell is not None:
                result = cell["summary"]["win_rate"][PARTIAL[entry.metric]]
                rate = "-" if result["rate"] is None else percent(result | {"mean": result["rate"]})  # None: all tied
                values = rate, result["n"], f"{100 * result['tie_rate']:.1f}"
                moved = cell["summary"].get("moved")
                change = "-" if moved is None else f"{moved['levels']:.3g}"
                rows.append(row(entry.name, seed, *values, tie_of(result), change))
    if not rows:
        return []
    what = "videos" if entries[0].metric == MOTION else "images"
    titles = table("recipe", "seed", "win rate, per cent", f"{what} not tied", "ties, per cent", "a tie", "change")
    return [WINS.format(what=what[:-1], partial=PARTIAL[entries[0].metric]), *titles, *rows]


def reached(curve: Curve, goal: float) -> float | None:
    """CPU seconds at the first evaluation that, together with the next one, is at `goal` on average; None: never.

    One evaluation alone would let the luckiest of a dozen decide. The last one stands alone.
    """
    for (seconds, result), (_, following) in zip(curve, [*curve[1:], curve[-1]], strict=True):
        if (result + following) / 2 >= goal:
            return seconds
    return None


def at(curve: Curve, seconds: float) -> float:
    """Accuracy after so many CPU seconds, in proportion between the evaluations on both sides.

    >>> at([(10.0, 0.4), (20.0, 0.5), (30.0, 0.9)], 25.0)
    0.7
    """
    times, result = zip(*curve, strict=True)
    return float(np.interp(seconds, times, result))


def raced(entries: list[Entry]) -> list[Entry]:
    """Recipes that were evaluated often on the way: a curve has the base and the end too."""
    return [entry for entry in entries if entry.curves and min(map(len, entry.curves.values())) >= MANY + 2]


def race(entries: list[Entry]) -> list[str]:
    """Lines on who reaches the quickstart's accuracy when, and on how far everyone is after the same work."""
    first, *others = entries
    if not first.curves:
        return []
    goal, whole = (statistics.mean(curve[-1][k] for curve in first.curves.values()) for k in (1, 0))
    lines = ["", "## Time to the quickstart's accuracy", "", RACE.format(goal=100 * goal, whole=whole, many=MANY)]
    lines += table("recipe", "CPU seconds, by seed", "share of the quickstart's, by seed", "mean", "95 % interval")
    for entry in raced(others):
        times = [reached(curve, goal) for curve in entry.curves.values()]
        shares = [None if time is None else time / whole for time in times]
        lines.append(
            row(
                entry.name,
                ", ".join("never" if time is None else f"{time:.0f}" for time in times),
                ", ".join("-" if share is None else f"{share:.2f}" for share in shares),
                *over_seeds(shares),
            )
        )
    there = [first, *raced(others)]
    spent = min(curve[-1][0] for entry in there for curve in entry.curves.values())
    lines += ["", EQUAL.format(spent=spent)]
    lines += table("recipe", "accuracy, by seed", "mean")
    for entry in there:
        values = [100 * at(curve, spent) for curve in entry.curves.values()]
        lines.append(row(entry.name, ", ".join(f"{v:.1f}" for v in values), f"{statistics.mean(values):.1f}"))
    return lines


def over_seeds(values: list[float | None]) -> tuple[str, str]:
    """Mean, and Student's interval for it, of at least two values that are all there."""
    there = [value for value in values if value is not None]
    if len(there) < max(2, len(values)):
        return "-", "-"
    mean, half = statistics.mean(there), half_width(there)
    return f"{mean:.2f}", f"{max(mean - half, 0):.2f} to {mean + half:.2f}"


def spread(gains: list[float]) -> str:
    """Student's interval for the mean gain over seeds; nothing for one seed."""
    if len(gains) < 2:
        return ""
    mean, half = statistics.mean(gains), half_width(gains)
    return f"{mean - half:+.1f} to {mean + half:+.1f}"


def half_width(values: list[float]) -> float:
    """Half of Student's 95 % interval for the mean of at least two values."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error * float(student_t.ppf(0.975, len(values) - 1))


def summary_table(entries: list[Entry]) -> list[str]:
    """Recipes over their seeds."""
    titles = table(
        *("recipe", "level", "mean difference", "95 % over seeds", "lowest lower end", "seeds", "iterations"),
        *("evaluations", "mean CPU seconds"),
    )
    return titles + [summary_row(entry) for entry in entries]


def page(entries: list[Entry], more: list[str]) -> str:
    """The page: recipes of images over their seeds, the race, more sections, wins, sizes, all cells."""
    images = [entry for entry in entries if entry.metric == METRIC]
    lines = [HEAD, *summary_table([entry for entry in images if not entry.sized])]
    lines += [*race(images), *more]
    preferring = wins([entry for entry in images if entry.preferring])
    lines += ["", "## Win rate", "", *preferring] if preferring else []
    lines += sizes([entry for entry in images if entry.sized])
    lines += ["", "## Every cell", "", CELLS]
    lines += table(
        *("recipe", "seed", "base", "base, best CFG", "tuned", "difference", "difference, each at its best CFG"),
        *("diversity", "iterations", "evaluations", "CPU seconds", "seconds", "commit"),
    )
    # A recipe without any cell stands in the first tables alone.
    lines += [cell_row(entry, seed) for entry in entries if entry.summaries for seed in entry.cells]
    return "\n".join(lines) + "\n"
