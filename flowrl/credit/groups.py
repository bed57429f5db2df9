"""Rewards of groups: their weighted sum, means that leave failures out, and groups without a difference."""

import torch
from torch import Tensor


def aggregate(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of raw rewards [R, P, G] with weights [R] -> [P, G] float64; zero weights are only logged."""
    rewards, weights = live(rewards, weights)
    return (rewards * weights[:, None, None]).sum(dim=0)


def live(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [R', P, G] and weights [R'] of those whose weight is not 0, float64."""
    counted = weights != 0
    if not bool(counted.any()):
        raise ValueError("every reward has weight 0: nothing to train on")
    return rewards[counted].double(), weights[counted].double()


def group_moments(total: Tensor) -> tuple[Tensor, Tensor]:
    """(std, mean) of the rewards [P, G] of each group, over its valid samples; [P] float64 each."""
    mean = masked_mean(total, total.isfinite())
    return masked_mean((total - mean).square(), total.isfinite()).squeeze(1).sqrt(), mean.squeeze(1)


def masked_mean(values: Tensor, mask: Tensor, ddof: int = 0) -> Tensor:
    """Mean over the second axis, [P, 1]."""
    count = (mask.sum(dim=1, keepdim=True) - ddof).clamp(min=1)
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / count


def over(centred: Tensor, scale: Tensor) -> Tensor:
    """centred / scale; a scale of 0 (no spread, eps 0) divides by nothing."""
    return centred / torch.where(scale == 0, 1.0, scale)


def dead_groups(filled: Tensor, valid: Tensor) -> Tensor:
    """[P] groups without two different rewards."""
    low = torch.where(valid, filled, torch.inf).amin(dim=1)
    high = torch.where(valid, filled, -torch.inf).amax(dim=1)
    return ~(high > low)
