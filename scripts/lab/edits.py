"""The lab's recipes on edits: their section of the page, and accuracy by operation."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.edited_shapes import OPERATIONS, parse
from flowrl.evaluation.results import Evaluation
from scripts.lab.page import EDIT, Entry, percent, row, summary_table, table, wins

COPY = "edit_unchanged"
TEXT = """\
The methods on edits: `assets/tiny-kontext`, a FluxKontextPipeline at 32 px that is told what to change of a source
([edits of the shapes world](rewards/shapes_edit.md)). Strict accuracy (`edit_strict`: the edit follows the instruction
and keeps everything else) in per cent on the {edits} held-out edits of `shapes-edit-heldout.jsonl` x 2 fixed seeds, ODE
sampler without CFG; the rest as above. `edit-diffusion_dpo` learns from pairs of the model's own samples,
`edit-diffusion_dpo-source` from known results against their sources, which needs no sampling.
"""
PARTS = """\
Can a gain come from leaving the source as it is? *Copied* is the share of results that show the source unchanged
(`edit_unchanged`, less is better), *follows* and *keeps* are the two halves of strict accuracy, in per cent; changes
are paired differences over the base's, with 95 % intervals over edits.
"""
BY_OPERATION = """\
Strict accuracy by operation in per cent, mean of a recipe's seeds, with the base's in the first row.
"""


def by_operation(evaluation: Evaluation) -> dict[str, float]:
    """Operation -> strict accuracy of its edits, in the order of the world."""
    operations = np.asarray([parse(prompt).operation for prompt in evaluation.prompts])
    means = evaluation.scores[EDIT].mean(axis=1)
    return {name: round(float(means[operations == name].mean()), 6) for name in OPERATIONS if name in operations}


def edits_section(entries: list[Entry]) -> list[str]:
    """Lines on the recipes that edit: over their seeds, copies and halves of the accuracy, operations, wins."""
    measured = [entry for entry in entries if entry.summaries]
    if not measured:
        return []
    edits = measured[0].summaries[0]["base"][EDIT]["n"]
    lines = ["", "## Editing", "", TEXT.format(edits=edits), *summary_table(entries)]
    lines += ["", "### Copies of the source", "", PARTS]
    lines += table("recipe", "seed", "copied, base", "copied, tuned", "change", "follows, change", "keeps, change")
    lines += [_copies(entry.name, seed, cell["summary"]) for entry in measured for seed, cell in entry.counted.items()]
    lines += ["", "### By operation", "", BY_OPERATION, *_operations(measured)]
    preferring = wins([entry for entry in measured if entry.preferring])
    return lines + (["", "### Win rate on edits", "", *preferring] if preferring else [])


def _copies(name: str, seed: int, values: dict[str, Any]) -> str:
    shares = (f"{100 * values[when][COPY]['mean']:.1f}" for when in ("base", "tuned"))
    changes = (percent(values["difference"][key], "+") for key in (COPY, "edit_follows", "edit_keeps"))
    return row(name, seed, *shares, *changes)


def _operations(entries: list[Entry]) -> list[str]:
    first = entries[0].summaries[0]["operations"]["base"]
    lines = table("recipe", *first)
    lines.append(row("base", *(f"{100 * share:.0f}" for share in first.values())))
    for entry in entries:
        tuned = [values["operations"]["tuned"] for values in entry.summaries]
        lines.append(row(entry.name, *(f"{100 * np.mean([each[name] for each in tuned]):.0f}" for name in first)))
    return lines
