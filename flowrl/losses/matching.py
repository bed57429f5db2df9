"""Losses on matching errors of noised clean samples, per row until the caller sums.

    x = alpha x0 + sigma eps     v* what the network should output there     l = mean over dims of (v - v*)^2

Errors are taken in float32 (of float64 outputs in float64) and averaged in float64: policies differ in the last
digits of l.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.tensors import numbered
from flowrl.diffusion.process import expand

_LEAST = 1e-5  # of self-normalising weights
_OFFSET = 1e-10  # keeps the power of an error differentiable at 0

ErrorWeighting = Literal["uniform", "sigma", "sigma2", "huber", "ghuber"]


def mean_square(left: Tensor, right: Tensor) -> Tensor:
    """Mean over dims of (left - right)^2, both [M, ...] -> [M] float64."""
    if left.shape != right.shape:
        raise ValueError(f"outputs {tuple(left.shape)} and {tuple(right.shape)} must agree")
    return (_exact(left) - _exact(right)).square().flatten(1).mean(dim=1, dtype=torch.float64)


def mean_distance(left: Tensor, right: Tensor) -> Tensor:
    """Mean over dims of |left - right|, detached, both [M, ...] -> [M] float64, at least 1e-5."""
    distance = (_exact(left.detach()) - _exact(right)).abs().flatten(1).mean(dim=1, dtype=torch.float64)
    return distance.clamp(min=_LEAST)


def _exact(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


# ---- the matching error as a log-prob: AWM, FPO


def matching_log_prob(error: Tensor, sigma: Tensor, weighting: ErrorWeighting, power: float = 0.25) -> Tensor:
    """The weighted negative matching error, AWM's stand-in for log p(x0 | c).

        uniform  -l                     huber   -sigma (sqrt(l + e) - sqrt(e))
        sigma    -sigma l               ghuber  -sigma ((l + e)^p - e^p) / p
        sigma2   -sigma^2 l             e = 1e-10

    Args:
        error: l [M] float64.
        sigma: [M].
        weighting: as above. The Huber forms bound the push of a negative advantage, whose weight falls as l grows.
        power: p of `ghuber`; 1 is `sigma`, 0.5 twice `huber`.

    Source: arXiv 2509.25050; scxue/advantage_weighted_matching:scripts/train_sd3_awm.py.

    >>> matching_log_prob(torch.tensor([0.25]), torch.tensor([0.5]), "sigma").tolist()
    [-0.125]
    """
    sigma = sigma.to(error)
    if weighting == "uniform":
        return -error
    if weighting == "sigma":
        return -sigma * error
    if weighting == "sigma2":
        return -sigma.square() * error
    if weighting == "huber":
        return -sigma * ((error + _OFFSET).sqrt() - _OFFSET**0.5)
    return -sigma * ((error + _OFFSET) ** power - _OFFSET**power) / power


def elbo_weight(sigma: Tensor, noise_level: float = 0.7) -> Tensor:
    """1 / (2 s^2) with the Flow-SDE's s = a sqrt(sigma / (1 - sigma)), sigma at most 0.99; [M] float64."""
    sigma = sigma.double()
    return (1 - sigma.clamp(max=0.99)) / (2 * noise_level**2 * sigma)


# ---- two implicit policies: DiffusionNFT


def optimality(advantage: Tensor, bound: float) -> Tensor:
    """Probability [M] in [0, 1] that a sample is a good one: A clipped to +-bound, mapped linearly.

    >>> optimality(torch.tensor([-9.0, 0.0, 2.5]), 5.0).tolist()
    [0.0, 0.5, 0.75]
    """
    return (advantage / (2 * bound) + 0.5).clamp(0, 1)


def negative_aware_loss(
    policy: Tensor, old: Tensor, clean: Tensor, good: Tensor, mix: float, *, adaptive: bool = True
) -> Tensor:
    """(r L+ + (1 - r) L-) / beta, per row: the good half of the data pulls the policy, the bad half its mirror image.

        x+ = beta x + (1 - beta) x_old      x- = (1 + beta) x_old - beta x      L = mean (x+- - x0)^2 / w
        w = mean |x+- - x0|, without gradient

    Clean predictions are affine in velocities, so this is the same with v in place of x.

    Args:
        policy: its clean prediction x, [M, ...].
        old: that of the network which drew the samples, x_old.
        clean: x0.
        good: r in [0, 1], [M].
        mix: beta > 0.
        adaptive: False leaves w out.

    Source: arXiv 2509.16117; NVlabs/DiffusionNFT:scripts/train_nft_sd3.py.
    """
    positive, negative = mix * policy + (1 - mix) * old, (1 + mix) * old - mix * policy

    def branch(implicit: Tensor) -> Tensor:
        error = mean_square(implicit, clean)
        return error / mean_distance(implicit, clean) if adaptive else error

    good = good.double()
    return (good * branch(positive) + (1 - good) * branch(negative)) / mix


# ---- whole groups: DGPO, CRD


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Sum over the rows of the same group, at every row; values [M], group [M] int64."""
    number = numbered(group)
    return torch.zeros_like(values).index_add(0, number, values)[number]


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Mean over the rows of the same group, at every row; values [M], group [M] int64."""
    return group_sum(values, group) / group_sum(torch.ones_like(values), group)


def group_preference_weight(
    advantage: Tensor, error: Tensor, error_reference: Tensor, group: Tensor, beta: float
) -> Tensor:
    """sigmoid(beta / G * sum over the group of A (l - l_ref)), [M] without gradient: how wrong a group still stands.

    Times A l it has the gradient of -log sigmoid(-beta / G * sum A (l - l_ref)), but for the factor beta / G.

    Args:
        advantage: A [M].
        error: l [M].
        error_reference: l_ref [M].
        group: [M] int64; rows of one number are one group (of G rows), at one time.
        beta: inverse temperature.

    Source: arXiv 2510.08425; Luo-Yihong/DGPO:scripts/train_sd3_dgpo.py.
    """
    return torch.sigmoid(beta * group_mean((advantage.double() * (error - error_reference)).detach(), group))


def implicit_reward(policy: Tensor, old: Tensor, target: Tensor, *, adaptive: bool = True) -> Tensor:
    """l_old / w_old - l / w, [M] float64: log p / p_old by matching errors of outputs [M, ...].

    w = mean |v - v*| without gradient, or 1.
    """

    def error(output: Tensor) -> Tensor:
        value = mean_square(output, target)
        return value / mean_distance(output, target) if adaptive else value

    return error(old) - error(policy)


def centred(values: Tensor, group: Tensor, weight: Tensor) -> Tensor:
    """values - sg(weighted mean of the group), [M]; `weight` [M] sums to 1 over each group.

    Centring takes log Z(c) away, which is one constant per prompt.
    """
    return values - group_sum((weight * values).detach(), group)


# ---- regression to a target


def matched_target(reference: Tensor, old: Tensor, target: Tensor, advantage: Tensor, strength: float) -> Tensor:
    """v_ref + m A (v* - v_old), [M, ...]: the adjoint at the clean sample, moved along the path to (x, sigma).

    Source: arXiv 2605.10759.
    """
    return reference + expand((strength * advantage).to(reference), reference) * (target - old)


def softmax_weights(rewards: Tensor, temperature: float) -> Tensor:
    """exp(r / tau) over its sum in the group: rewards [P, G], NaN masked with weight 0; [P, G] float64.

    >>> softmax_weights(torch.tensor([[1.0, 1.0, float("nan")]]), 0.5).tolist()
    [[0.5, 0.5, 0.0]]
    """
    logits = (rewards.double() / temperature).masked_fill(~rewards.isfinite(), -torch.inf)
    return logits.softmax(dim=1).nan_to_num(0.0)
