"""Measures of sets of images by their features: spread inside a prompt, distance of two sets, coverage.

N images with D features each, float64. All but `kid` depend on N, so they are compared at equal numbers alone.
"""

import numpy as np


def log_det(grids: np.ndarray, bandwidth: float = 0.2) -> np.ndarray:
    """log det (K + I) of the G images of each of P prompts, [P]; NaN where an image is not finite.

    K_ij is the mean over frames of exp(-d^2 / (2 bandwidth^2)), d the root mean square difference of two grids: what
    the reward `diversity` approximates. From log(G + 1), all equal, to G ln 2, all unlike. The grids are mean colours
    [P, G, F, D] of F frames; `bandwidth`: difference at which the similarity has fallen to exp(-1/2).
    """
    apart = ((grids[:, :, None] - grids[:, None]) ** 2).mean(-1)
    kernel = np.exp(-apart / (2 * bandwidth**2)).mean(-1)
    known = np.isfinite(kernel).all((1, 2))
    spread = np.linalg.slogdet(np.where(known[:, None, None], kernel, 0.0) + np.eye(kernel.shape[1]))[1]
    return np.where(known, spread, np.nan)


def kid(one: np.ndarray, other: np.ndarray) -> float:
    """Kernel inception distance: unbiased squared MMD of [N, D] and [M, D] by (x.y / D + 1)^3; mean 0 if alike."""

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def inside(a: np.ndarray) -> float:
        table = kernel(a, a)
        return float((table.sum() - np.trace(table)) / (len(a) * (len(a) - 1)))

    return inside(one) + inside(other) - 2 * float(kernel(one, other).mean())


def vendi(features: np.ndarray) -> float:
    """Effective number of different images among [N, D], by cosine: 1, all equal, to N, all orthogonal."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    shares = np.linalg.eigvalsh(unit @ unit.T / len(unit))
    shares = shares[shares > 1e-12]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def precision_recall(made: np.ndarray, real: np.ndarray, k: int = 3) -> tuple[float, float]:
    """Share of `made` [N, D] within reach of `real` [M, D], and of `real` within reach of `made`.

    In reach: not farther from some image than its k-th neighbour of its own set. Equal sets have 1 and 1.
    """

    def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        squared = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        return np.sqrt(np.maximum(squared, 0))

    def covered(points: np.ndarray, by: np.ndarray) -> float:
        reach = np.sort(apart(by, by), axis=1)[:, min(k, len(by) - 1)]
        return float((apart(points, by) <= reach + 1e-9).any(axis=1).mean())

    return covered(made, real), covered(real, made)
