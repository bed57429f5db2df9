"""Pure losses. Nothing here knows a model; everything is float32 and per sample until the caller sums."""

from __future__ import annotations

from torch import Tensor


def clipped_ratio_loss(log_ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
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
    low, high = clip_range
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return unclipped.maximum(clipped), clipped > unclipped
