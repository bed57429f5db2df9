"""Sharpness: the mean absolute difference of neighbouring pixels along both axes, of images and of video frames.

Blur lowers it and noise raises it, so it says nothing without that of the base on the same prompts and noise.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.evaluation.results import Evaluation
from flowrl.statistics import paired

METRIC = "eval/image_sharpness"
"""Key of the metrics row."""
LOSS = 0.05
"""Share of the base's sharpness whose loss is bad news, where the whole interval is beyond it: blur, or fewer edges."""


def sharpness(levels: np.ndarray) -> float:
    """That of an image [3, H, W] or a video [F, 3, H, W] of uint8 levels, in [0, 1]; NaN for a single pixel.

    One frame is looked at after the other, so a long video takes no more memory than an image.

    >>> sharpness(np.asarray([[[0, 255], [0, 255]]], dtype=np.uint8))
    0.5
    """
    total = count = 0
    for frame in levels if levels.ndim == 4 else levels[None]:
        signed = frame.astype(np.int16)
        for axis in (-2, -1):
            steps = np.abs(np.diff(signed, axis=axis))
            total, count = total + int(steps.sum(dtype=np.int64)), count + steps.size
    return total / (255 * count) if count else math.nan


def facts(base: Evaluation, tuned: Evaluation | None) -> dict[str, Any] | None:
    """Means of base and tuned and their paired difference, with intervals over prompts; None: without an image."""
    if not base.prompts:
        return None
    return paired.beside(base.sharpness, None if tuned is None else tuned.sharpness, base.groups, (0.0, 1.0))


def change(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """(mean, low, high) of the difference as a share of the base's sharpness; NaN where there is none."""
    base, values = found["base"]["mean"], found.get("difference") or {}
    ends = (values.get(name) for name in ("mean", "low", "high"))
    mean, low, high = (end / base if base and end is not None else math.nan for end in ends)
    return mean, low, high


def lost(found: Mapping[str, Any]) -> bool:
    """Whether the tuned images have surely lost more than `LOSS` of the base's sharpness."""
    return change(found)[2] < -LOSS


def sentence(found: Mapping[str, Any]) -> str:
    """Sharpness of the tuned images beside the base's, of `facts` with both."""
    mean, low, high = change(found)
    text = f"Sharpness, the mean difference of neighbouring pixels: {found['tuned']['mean']:.4g}, "
    text += f"the base's {found['base']['mean']:.4g}"
    if math.isfinite(mean):
        text += f", so {100 * mean:+.1f} %"
    ends = f" (95 % interval {100 * low:+.1f} to {100 * high:+.1f} %)" if math.isfinite(low) else ""
    return f"{text}{ends}{'; a clear loss' if lost(found) else ''}."
