"""The copy index: the share of an evaluation's images that leave the place of the edit as it was in their source.

By a judge's output `edit_unchanged` where one is evaluated, else by pixels: a copy is nearer to its source than two
round trips of the VAE (sources.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import format_interval
from flowrl.statistics import paired

METRIC = "eval/copy_index"
"""Key of the metrics row."""
JUDGED = "edit_unchanged"
"""Output of a judge: 1 where nothing was edited, else 0."""
NEAR = 2.0


def copied(evaluation: Evaluation) -> np.ndarray | None:
    """1 for a copy of the source, else 0, NaN where it is not known, [P, S] float64; None: nothing is edited."""
    apart = evaluation.source_distance
    pixels = None if apart is None else np.where(np.isnan(apart), np.nan, apart < NEAR)
    return evaluation.scores.get(JUDGED, pixels)


def facts(base: Evaluation, tuned: Evaluation | None) -> dict[str, Any] | None:
    """The index of base and tuned and the paired difference, with intervals over prompts, and `by` which rule.

    None: nothing is edited, or one was measured by another rule.
    """
    before, after = copied(base), None if tuned is None else copied(tuned)
    by = [JUDGED if JUDGED in each.scores else "pixels" for each in (base, tuned) if each is not None]
    if before is None or (tuned is not None and after is None) or len(set(by)) > 1:
        return None
    return {"by": by[0]} | paired.beside(before, after, base.groups, (0.0, 1.0))


def risen(found: Mapping[str, Any]) -> bool:
    """Whether surely more of the tuned images are copies than of the base's, of `facts` with both."""
    return (found["difference"]["low"] or 0.0) > 0


def sentence(found: Mapping[str, Any]) -> str:
    """The index of the tuned images beside the base's, of `facts` with both."""
    change = found["difference"]
    text = f"Copy index by {found['by']}, the share of images that leave the place of the edit as it was: "
    text += f"{found['tuned']['mean']:.3f}, the base's {found['base']['mean']:.3f}, so {change['mean']:+.3f}"
    return f"{text} ({format_interval(change, '+.3f')}){'; a clear rise' if risen(found) else ''}."
