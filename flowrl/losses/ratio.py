"""Losses on ratios of probabilities, per row until the caller sums, and the log-prob of the initial noise."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.diffusion.process import expand
from flowrl.samplers.base import KLDivisor, StepDistribution

SurrogateName = Literal["clip", "none", "preserve", "quadratic"]
NoiseForm = Literal["sum", "sqrt", "mean"]


class Bounds(NamedTuple):
    """Largest fall and rise of each ratio, where they differ from edge to edge; shaped like the ratio."""

    low: Tensor
    high: Tensor


def clipped_ratio_loss(
    log_ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float] | Bounds
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clamp(r, 1 - low, 1 + high)) with r = exp(log_ratio), per sample. `log_ratio`, log pi - log pi_old,
    and `advantages` have any one shape; `clip_range` is (low, high), in the units of this log-prob form. The loss is
    shaped like them, and so is a bool tensor: True where the clip took the gradient away.

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


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """A loss of the ratio r = e^l. They differ in the factor g of the gradient -A g by l:

        clip       g = r within 1 - low .. 1 + high and wherever r moves against A, else 0
        none       g = r. CISPO (arXiv 2506.13585), SAPO (2511.20347) and PSPO (2509.21282) at their published constants
                   are this, and dual clip (1912.09729) is `clip`: they act on ratios away from 1, and a log-prob that
                   is a mean over latent dims has ratios within hundredths of it
        preserve   as clip, but where that gives 0, b_high (1 + high) for A > 0 and b_low (1 - low) for A < 0
        quadratic  g = 1 - l / (eta A), the loss -A l + l^2 / (2 eta): a pull to l = 0 on every term

    Source: arXiv 1707.06347 (clip); 2509.20712, Kwai-Klear/CE-GPPO (preserve); 2506.07464 and verl's `dro` (quadratic).
    """

    name: SurrogateName = "clip"
    bounds: tuple[float, float] | Bounds
    """(low, high): largest fall and rise."""
    kept: tuple[float, float] = (0.5, 1.0)
    """(b_low, b_high) of `preserve`."""
    eta: float | None = None
    """Of `quadratic`; None: low where l < 0, high where l > 0."""


def surrogate_loss(log_ratio: Tensor, advantages: Tensor, rule: Surrogate) -> tuple[Tensor, Tensor]:
    """The loss of a surrogate, per sample, of log_ratio and advantages of one shape.

    Returns:
        loss shaped like the inputs, and a bool tensor: True where less than half of the gradient is left (g < 1/2).

    >>> rule = Surrogate(name="quadratic", bounds=(0.1, 0.1))
    >>> surrogate_loss(torch.tensor([0.0, 0.2]), torch.ones(2), rule)[1].tolist()
    [False, True]
    """
    loss, clipped = clipped_ratio_loss(log_ratio, advantages, rule.bounds)
    if rule.name == "clip":
        return loss, clipped
    low, high = rule.bounds
    if rule.name == "quadratic":
        up = (log_ratio > 0).to(log_ratio)
        eta = up * high + (1 - up) * low if rule.eta is None else rule.eta
        pull = log_ratio.detach() / eta
        return log_ratio.square() / (2 * eta) - advantages * log_ratio, pull * advantages > advantages.square() / 2
    if rule.name == "none":
        return -advantages * log_ratio.exp(), torch.zeros_like(clipped)
    good = (advantages > 0).to(log_ratio)
    left = good * rule.kept[1] * (1 + high) + (1 - good) * rule.kept[0] * (1 - low)
    # The exponential has the value 1 and its own gradient.
    outside = -advantages * left * (log_ratio - log_ratio.detach()).exp()
    return torch.where(clipped, outside, loss), clipped & (left < 0.5)


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
    """-A r, but 0 without gradient where `far` and the ratio has moved in the direction of A. `log_ratio`, log pi - log
    pi_old, `advantages` and `far` have any one shape; `far` is True where the step has left its old distribution by
    more than a threshold. The loss is shaped like them, and so is a bool tensor: True where the term was dropped.

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


def projected(
    policy: StepDistribution, mean_old: Tensor, threshold: float, divisor: KLDivisor
) -> tuple[StepDistribution, Tensor]:
    """The step with its mean drawn back to the ball KL <= threshold around mean_old, and where that did so, [B] bool.

        mean~ = mean_old + (mean - mean_old) min(1, sqrt(threshold / KL))

    A step that was drawn back keeps the part of its gradient that turns it around mean_old, and none that moves it
    outwards. `mean_old` [B, ...] is float32.

    Source: arXiv 2101.09207, the mean projection; arXiv 2510.03817 projects the distributions of tokens.

    >>> policy = StepDistribution(mean=torch.full((1, 2), 4.0), std=torch.ones(1))
    >>> projected(policy, torch.zeros(1, 2), 2.0, "variance")[0].mean.round(decimals=4).tolist()
    [[2.0, 2.0]]
    """
    kl = policy.kl(StepDistribution(mean_old, policy.std), divisor=divisor)
    far = kl > threshold
    # Finite and not 0 wherever it is not used, or its gradient there would be 0 * inf.
    scale = min(threshold, 1e30) ** 0.5 / torch.where(far, kl, 1.0).sqrt()
    drawn = mean_old + (policy.mean - mean_old) * expand(scale, mean_old)
    return replace(policy, mean=torch.where(expand(far, mean_old), drawn, policy.mean)), far


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
