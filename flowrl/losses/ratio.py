"""Losses on ratios of probabilities, per row until the caller sums, and the log-prob of the initial noise."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.diffusion.process import expand
from flowrl.samplers.base import StepDistribution

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

    >>> clamped_ratio_loss(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -2.0]), (0.5, 0.5))[0].tolist()
    [-1.5, 3.0]
    """
    if log_ratio.shape != advantages.shape:
        raise ValueError(f"log_ratio {tuple(log_ratio.shape)} and advantages {tuple(advantages.shape)} must agree")
    ratio, (low, high) = log_ratio.exp(), clip_range
    clamped = ratio.clamp(1 - low, 1 + high)
    return -advantages * clamped, clamped != ratio


def masked_ratio_loss(log_ratio: Tensor, advantages: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """-A r, but 0 without gradient where `far` and the ratio has moved in the direction of A.

    Args:
        log_ratio: log pi - log pi_old, any shape.
        advantages: same shape.
        far: same shape, bool: the step has left its old distribution by more than a threshold.

    Returns:
        loss shaped like the inputs, and a bool tensor: True where the term was dropped.

    Source: arXiv 2606.11025; Tencent-Hunyuan/UniRL:unirl/algorithms/flowdppo.py.

    >>> far = torch.tensor([True, True])
    >>> loss, dropped = masked_ratio_loss(torch.tensor([0.5, 0.5]), torch.tensor([1.0, -1.0]), far)
    >>> dropped.tolist()
    [True, False]
    """
    if not log_ratio.shape == advantages.shape == far.shape:
        raise ValueError(f"log_ratio {tuple(log_ratio.shape)} and advantages {tuple(advantages.shape)} must agree")
    dropped = far & (log_ratio.detach() * advantages > 0)
    # Before the exponential: a masked infinite ratio would still have the gradient inf * 0.
    ratio = torch.where(dropped, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(dropped, torch.zeros_like(ratio), -advantages * ratio), dropped


def normalised_log_ratio(policy: StepDistribution, mean_old: Tensor, x_next: Tensor) -> Tensor:
    """Mean over dims of (x' - mean_old) / s * (mean - mean_old), [B], of means and x' [B, ...] float32 and std s [B].

    The log ratio of two steps of one std, freed of its negative bias and of 1 / s.

    Source: arXiv 2510.22319; yifan123/flow_grpo:scripts/train_sd3_GRPO_Guard.py.

    >>> policy = StepDistribution(mean=torch.full((1, 2), 0.5), std=torch.tensor([2.0]))
    >>> normalised_log_ratio(policy, torch.zeros(1, 2), torch.ones(1, 2)).tolist()
    [0.25]
    """
    noise = (x_next.float() - mean_old) / expand(policy.std, mean_old)
    return (noise * (policy.mean - mean_old)).flatten(1).mean(dim=1)


# ---- the distribution of the initial noise: FIND


def gaussian_log_prob(latents: Tensor, mean: Tensor, std: Tensor, form: NoiseForm) -> Tensor:
    """log N(latents; mean, std^2), all [M, ...] with D values a row, without its constant; [M] float64.

    sum   the density itself
    sqrt  sum / sqrt(D): a move of the mean by d std in every value changes it by a std of d, whatever D is
    mean  sum / D: that std is d / sqrt(D)

    >>> gaussian_log_prob(torch.ones(1, 4), torch.zeros(1, 4), torch.ones(1, 4), "sqrt").tolist()
    [-1.0]
    """
    mean, std = mean.double(), std.double()
    values = (-((latents.double() - mean) / std).square() / 2 - std.log()).flatten(1)
    count = values.shape[1]
    return values.sum(dim=1) / {"sum": 1, "sqrt": count**0.5, "mean": count}[form]


def noise_prior(mean: Tensor, std: Tensor) -> Tensor:
    """Mean over dims of mean^2 + (std - 1)^2, both [M, ...] -> [M] float64; 0 at the standard normal distribution.

    >>> noise_prior(torch.full((1, 4), 0.5), torch.ones(1, 4)).tolist()
    [0.25]
    """
    return (mean.double().square() + (std.double() - 1).square()).flatten(1).mean(dim=1)
