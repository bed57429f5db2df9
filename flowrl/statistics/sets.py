"""Measures of sets of images by their features: spread inside a prompt, distance of two sets, coverage.

N images with D features each, float64. All but `kid` depend on N, so they are compared at equal numbers alone.
"""

from __future__ import annotations

import numpy as np


def log_det(grids: np.ndarray, bandwidth: float = 0.2) -> np.ndarray:
    """log det (K + I) of the G images of each of P prompts, [P]; NaN where an image is not finite.

    K_ij is the mean over frames of exp(-d^2 / (2 bandwidth^2)), d the root mean square difference of two grids: what
    the reward `diversity` approximates. From log(G + 1), all equal, to G ln 2, all unlike.

    Args:
        grids: mean colours [P, G, F, D] of F frames.
        bandwidth: difference at which the similarity has fallen to exp(-1/2).
    """
    apart = ((grids[:, :, None] - grids[:, None]) ** 2).mean(-1)
    kernel = np.exp(-apart / (2 * bandwidth**2)).mean(-1)
    known = np.isfinite(kernel).all((1, 2))
    spread = np.linalg.slogdet(np.where(known[:, None, None], kernel, 0.0) + np.eye(kernel.shape[1]))[1]
    return np.where(known, spread, np.nan)
