"""Gains of the lab now against those of a commit: which recipe fell?"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from scripts.lab.page import PARTIAL, SIZE, row, table
from scripts.lab.recipes import ROOT

WANTED = 0.10
"""A gain that a recipe may not lose, in strict accuracy: ten points."""


def gain(cells: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean gain over seeds and half of its 95 % interval.

    All seeds are evaluated on the same captions, so half an interval is the mean of theirs, not smaller by the number
    of seeds. A recipe that is rewarded for the size of its images is measured by the share of it that changes.
    """
    values = []
    for cell in cells:
        summary = cell["summary"]
        name = next(metric for metric in (SIZE, *PARTIAL) if metric in summary["difference"])
        unit = summary["base"][SIZE]["mean"] if name == SIZE else 1.0
        values.append({key: summary["difference"][name][key] / unit for key in ("mean", "low", "high")})
    mean = sum(value["mean"] for value in values) / len(values)
    return mean, sum(value["high"] - value["low"] for value in values) / (2 * len(values))


def verdict(old: tuple[float, float], new: tuple[float, float], *, sized: bool = False) -> str:
    """What a change of a gain means; "" for nothing.

    The intervals of both are added as those of independent numbers, which is wide: the captions are the same.
    """
    # The size of images may be wanted smaller: then the fall is towards 0 too.
    fallen = (old[0] - new[0]) * (1 if old[0] >= 0 else -1)
    half = (old[1] ** 2 + new[1] ** 2) ** 0.5
    if fallen > half:
        return "FELL by more than its interval"
    return "UNDER +10" if not sized and new[0] < WANTED <= old[0] else ""


def compare(commit: str, names: list[str], now: dict[str, Any]) -> tuple[list[str], bool]:
    """A table of the gains then and now, over the seeds that were measured anew; whether none fell.

    Raises:
        SystemExit: the commit has no results.
    """
    command = ["git", "show", f"{commit}:docs/lab/results.json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{' '.join(command)}: {shown.stderr.strip()}")
    then = json.loads(shown.stdout)
    lines = table("recipe", f"at {commit}", "now", "change", "seeds", "verdict")
    good = True
    for name in names:
        keys = [key for key in now if key.rpartition("/")[0] == name]
        both = [key for key in keys if key in then and then[key]["summary"]["tuned"] != now[key]["summary"]["tuned"]]
        if not both:
            why = "not run" if not keys else "new" if not any(key in then for key in keys) else "not measured anew"
            lines.append(row(name, "", "", "", 0, why))
            continue
        old, new = gain([then[key] for key in both]), gain([now[key] for key in both])
        found = verdict(old, new, sized=SIZE in now[both[0]]["summary"]["difference"])
        good = good and not found
        shown_as = [f"{100 * mean:+.1f} +- {100 * half:.1f}" for mean, half in (old, new)]
        change, half = 100 * (new[0] - old[0]), 100 * (old[1] ** 2 + new[1] ** 2) ** 0.5
        seeds = ", ".join(sorted(key.rpartition("/")[2] for key in both))
        lines.append(row(name, *shown_as, f"{change:+.1f} +- {half:.1f}", seeds, found or "-"))
    return lines, good
