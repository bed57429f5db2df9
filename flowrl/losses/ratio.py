"""Losses on ratios of probabilities, per row until the caller sums, and the log-prob of the initial noise."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

NoiseForm = Literal["sum", "sqrt", "mean"]


class Bounds(NamedTuple):
    """Largest fall and rise of each ratio, where they differ from edge to edge; shaped like the ratio."""

    low: Tensor
    high: Tensor


def clipped_ratio_loss(
    log_ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float] | Bounds
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clamp(r, 1 - low, 1 + high)) with r = exp(log_ratio), per sample.

    Args:
        log_ratio: log pi - log pi_old, any shape.
        advantages: same shape.
        clip_range: (low, high), in the units of this log-prob form.

    Returns:
        loss shaped like the inputs, and a bool tensor: True where the clip took the gradient away.

    Source: arXiv 1707.06347, eq. 7.

    >>> import torch
    >>> clipped_ratio_loss(torch.zeros(2), torch.tensor([1.0, -2.0]), (0.1, 0.1))[0].tolist()
    [-1.0, 2.0]
    """
    if log_ratio.shape != advantages.shape:
        raise ValueError(f"log_ratio {tuple(log_ratio.shape)} and advantages {tuple(advantages.shape)} must agree")
    ratio = log_ratio.exp()
    if isinstance(clip_range, Bounds):
        clipped = -advantages * ratio.clamp(1 - clip_range.low, 1 + clip_range.high)
    else:
        low, high = clip_range
        clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    unclipped = -advantages * ratio
    return unclipped.maximum(clipped), clipped > unclipped


def clamped_ratio_loss(log_ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """-A clamp(r, 1 - low, 1 + high): no gradient outside the band, whatever the sign of A; else `clipped_ratio_loss`.

    Source: arXiv 2305.16381; google-research/google-research:dpok/train_online_pg.py.

    >>> import torch
    >>> clamped_ratio_loss(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -2.0]), (0.5, 0.5))[0].tolist()
    [-1.5, 3.0]
    """
    if log_ratio.shape != advantages.shape:
        raise ValueError(f"log_ratio {tuple(log_ratio.shape)} and advantages {tuple(advantages.shape)} must agree")
    ratio, (low, high) = log_ratio.exp(), clip_range
    clamped = ratio.clamp(1 - low, 1 + high)
    return -advantages * clamped, clamped != ratio


# ---- the distribution of the initial noise: FIND


def gaussian_log_prob(latents: Tensor, mean: Tensor, std: Tensor, form: NoiseForm) -> Tensor:
    """log N(latents; mean, std^2), all [M, ...] with D values a row, without its constant; [M] float64.

    sum   the density itself
    sqrt  sum / sqrt(D): a move of the mean by d std in every value changes it by a std of d, whatever D is
    mean  sum / D: that std is d / sqrt(D)
    """
    mean, std = mean.double(), std.double()
    values = (-((latents.double() - mean) / std).square() / 2 - std.log()).flatten(1)
    count = values.shape[1]
    return values.sum(dim=1) / {"sum": 1, "sqrt": count**0.5, "mean": count}[form]


def noise_prior(mean: Tensor, std: Tensor) -> Tensor:
    """Mean over dims of mean^2 + (std - 1)^2, both [M, ...] -> [M] float64; 0 at the standard normal distribution."""
    return (mean.double().square() + (std.double() - 1).square()).flatten(1).mean(dim=1)
