"""Advantage rules: pure functions on rewards [R, P, G], in float64.

Order everywhere: aggregate the rewards, centre, scale, clip. NaN marks a masked sample: it enters no
statistic and gets advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Advantages:
    """values [P, G] float32 (0 where masked or dead), valid [P, G] bool, dead [P] bool (no spread in the group)."""

    values: Tensor
    valid: Tensor
    dead: Tensor


def aggregate(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of raw rewards [R, P, G] with weights [R] -> [P, G] float64; zero weights are only logged."""
    live = weights != 0
    if not bool(live.any()):
        raise ValueError("every reward has weight 0: nothing to train on")
    return (rewards[live].double() * weights[live].double()[:, None, None]).sum(dim=0)


def _masked_mean(values: Tensor, valid: Tensor, dim: int) -> Tensor:
    count = valid.sum(dim=dim, keepdim=True).clamp(min=1)
    return torch.where(valid, values, 0.0).sum(dim=dim, keepdim=True) / count


def group_advantages(
    total: Tensor,
    *,
    std: Literal["global", "group", "none"] = "group",
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Advantages:
    """(reward - mean of its group) / (std + eps), clipped to +-clip.

    Args:
        total: one reward per sample, [P, G]; NaN masks.
        std: over the group, over all samples of the iteration ("global"), or no division ("none").
        eps: added to the std. numpy's ddof 0, as the official code.
        clip: bound on the absolute advantage, None for none.

    A group whose rewards are all equal is dead: its advantages are exactly 0, also with a global std.

    Source: arXiv 2505.05470; yifan123/flow_grpo:flow_grpo/stat_tracking.py.

    >>> group_advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), eps=0.0).values.tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    if total.ndim != 2:
        raise ValueError(f"rewards must be [P, G], got {tuple(total.shape)}")
    total = total.double()
    valid = total.isfinite()
    filled = torch.where(valid, total, 0.0)
    centred = torch.where(valid, filled - _masked_mean(filled, valid, 1), 0.0)
    low = torch.where(valid, filled, torch.inf).amin(dim=1)
    high = torch.where(valid, filled, -torch.inf).amax(dim=1)
    dead = ~(high > low)
    if std == "group":
        scale = _masked_mean(centred.square(), valid, 1).sqrt() + eps
    elif std == "global":
        pooled, mask = filled.reshape(1, -1), valid.reshape(1, -1)
        scale = _masked_mean((pooled - _masked_mean(pooled, mask, 1)).square(), mask, 1).sqrt() + eps
    elif std == "none":
        scale = torch.ones(1, 1, dtype=torch.float64)
    else:
        raise ValueError(f"std={std!r}; use 'global', 'group' or 'none'")
    # Exactly 0, not the rounding error of the mean, which a small std would magnify.
    values = torch.where(dead[:, None], 0.0, centred / torch.where(scale == 0, 1.0, scale))
    if clip is not None:
        values = values.clamp(-clip, clip)
    return Advantages(values=values.float(), valid=valid, dead=dead)
