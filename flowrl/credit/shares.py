"""How much each of several rewards decides of the order of a group's samples. R rewards, P prompts, G samples."""

from torch import Tensor


def variance_shares(rewards: Tensor, weights: Tensor, valid: Tensor) -> list[float] | None:
    """Share of each reward in the variance of the weighted sum inside groups, [R]; they add up to 1.

    The share of a reward is the covariance of its weighted values with the sum, over the variance of the sum, both
    pooled over groups. It is below 0 for a reward that the others outweigh in the opposite direction. Rewards are
    training values, [R, P, G], weights [R]; `valid` [P, G] bool leaves out other samples. None where the sum does not
    vary inside any group.

    >>> import torch
    >>> variance_shares(torch.tensor([[[0.0, 3.0]], [[0.0, 1.0]]]), torch.ones(2), torch.ones(1, 2, dtype=torch.bool))
    [0.75, 0.25]
    """
    parts = (rewards.double().nan_to_num() * weights.double()[:, None, None]) * valid
    count = valid.sum(dim=1, keepdim=True).clamp(min=1)
    parts = (parts - parts.sum(dim=2, keepdim=True) / count) * valid
    total = parts.sum(dim=0)
    variance = float(total.square().sum())
    if not variance > 0:
        return None
    return [float((part * total).sum()) / variance for part in parts]
