"""Diversity of an evaluation: how unlike the first 4 images of a prompt are, `log_det` of their 8 x 8 mean colours."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.evaluation.statistics import format_interval
from flowrl.statistics import paired
from flowrl.statistics.sets import log_det

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.core.types import SampleId
    from flowrl.evaluation.results import Evaluation

SAMPLES, PROMPTS = 4, 128
"""Images of a prompt, and prompts that have them for nothing where so many are drawn."""


def grid(levels: "Tensor", finite: bool = True) -> np.ndarray:
    """Mean colours [F, 192] in [0, 1] of an image [3, H, W] or a video [F, 3, H, W] in 8 bits; NaN if not finite."""
    import torch.nn.functional as F  # a report reads what is measured without torch

    frames = levels if levels.ndim == 4 else levels[None]
    colours = F.adaptive_avg_pool2d(frames.float() / 255, 8).flatten(1).double().numpy()
    return colours if finite else np.full_like(colours, np.nan)


def of(grids: "Mapping[SampleId, np.ndarray]", prompts: int) -> np.ndarray | None:
    """Diversity of the first prompts, [prompts]; NaN for one of which a sample is missing, None for no prompts."""
    from flowrl.core.types import SampleId

    if not prompts or not grids:
        return None
    none = np.full_like(next(iter(grids.values())), np.nan)
    rows = [[grids.get(SampleId(slot, k), none) for k in range(SAMPLES)] for slot in range(prompts)]
    return log_det(np.asarray(rows))


def facts(base: "Evaluation", tuned: "Evaluation") -> dict[str, Any] | None:
    """Means of both and the paired difference, with intervals over prompts; None: not both were measured alike."""
    before, after = base.diversity, tuned.diversity
    if before is None or after is None or not 0 < len(before) == len(after):
        return None
    return paired.beside(before[:, None], after[:, None], base.groups[: len(before)])


def sentence(found: Mapping[str, Any]) -> str:
    """The tuned model's diversity beside the base's, of `facts`."""
    change = found["difference"]
    return (
        f"Diversity of {SAMPLES} samples of a prompt, log det of their colours' similarity on {change['n']} prompts: "
        f"{found['tuned']['mean']:.3f}, the base's {found['base']['mean']:.3f}, so {change['mean']:+.3f} "
        f"({format_interval(change, '+.3f')})."
    )
