"""The same prompts and noise side by side: a row for each prompt, a column for the base and for each run."""

from pathlib import Path
from typing import Any

import numpy as np

from flowrl.apps.gallery import images
from flowrl.apps.gallery.compare.shared import Shared, SharedMetric, label_of
from flowrl.apps.gallery.images import Place

ROWS = 24
IMAGE_PX = 224
"""Longest side of an embedded image, in pixels."""
BUDGET = 6 << 20
"""Bytes of embedded images, as text of the page; rows end where they are spent."""


def wall(shared: Shared, of: SharedMetric, order: list[int], place: Place) -> dict[str, Any]:
    """The table of images of what the runs share, with the metric `of` under each and the runs in this order from left
    to right: `columns` (names), `rows`, `wanted` (rows without the budget), `bases` (whether the bases' images are the
    same).
    """
    rows: list[dict[str, Any]] = []
    spent, same_base, wanted = 0, True, 0
    shown = [(order[0], True), *((i, False) for i in order)]
    for position, column in _drawn(shared):
        files = [_file(shared, run, position, column, base=base) for run, base in shown]
        if any(file is None for file in files):
            continue
        if wanted == ROWS:
            break
        wanted += 1
        if spent > BUDGET:
            continue
        bases = [_file(shared, i, position, column, base=True) for i in order]
        same_base = same_base and len({file.read_bytes() for file in bases if file is not None}) <= 1
        cells = []
        for file, (run, base) in zip(files, shown, strict=True):
            image = place.image(file, IMAGE_PX)
            spent += len(image["src"]) if image else 0
            cells.append({"image": image, **_score(shared, of, run, position, column, base=base)})
        text = shared.prompts[int(np.flatnonzero(shared.places == position)[0])]
        rows.append({"prompt_id": position, "text": text, "seed": shared.seeds[column], "cells": cells})
    names = ["base", *(label_of(shared.runs, i) for i in order)]
    return {"columns": names, "rows": rows, "wanted": wanted, "same_base": same_base}


def _drawn(shared: Shared) -> list[tuple[int, int]]:
    """(place, column of the seed) of the shared prompts in random order, no distinct prompt twice."""
    rng, seen, result = np.random.default_rng(images.SELECTION_SEED), set(), []
    columns = rng.integers(len(shared.seeds), size=len(shared.places))
    for p in rng.permutation(len(shared.places)):
        if int(shared.groups[p]) not in seen:
            seen.add(int(shared.groups[p]))
            result.append((int(shared.places[p]), int(columns[p])))
    return result


def _file(shared: Shared, run: int, place: int, column: int, *, base: bool) -> Path | None:
    evaluation = shared.evaluation(run, base=base)
    return evaluation.image(place, evaluation.seeds.index(shared.seeds[column]))


def _score(shared: Shared, of: SharedMetric, run: int, place: int, column: int, *, base: bool) -> dict[str, str]:
    if run not in of.members:
        return {"score": "", "tone": "same"}
    before, after = (shared.evaluation(run, base=which) for which in (True, False))
    values = [float(e.scores[of.metric.name][place, e.seeds.index(shared.seeds[column])]) for e in (before, after)]
    if base:
        return {"score": of.metric.single(values[0]), "tone": "same"}
    return {"score": of.metric.single(values[1]), "tone": of.metric.tone(values[1] - values[0])}
