"""Losses on matching errors of noised clean samples, per row until the caller sums.

    x = alpha x0 + sigma eps     v* what the network should output there     l = mean over dims of (v - v*)^2

Errors are taken in float32 (of float64 outputs in float64) and averaged in float64: policies differ in the last
digits of l.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowrl.core.tensors import numbered
from flowrl.diffusion.process import expand

_LEAST = 1e-5  # of self-normalising weights
_OFFSET = 1e-10  # keeps the power of an error differentiable at 0

ErrorWeighting = Literal["uniform", "sigma", "sigma2", "huber", "ghuber"]
RewardFit = Literal["mse", "bce"]


def mean_square(left: Tensor, right: Tensor) -> Tensor:
    """l = mean over dims of (left - right)^2, both [M, ...] -> [M] float64.

    >>> mean_square(torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.5)).tolist()
    [0.25]
    """
    if left.shape != right.shape:
        raise ValueError(f"outputs {tuple(left.shape)} and {tuple(right.shape)} must agree")
    return (_exact(left) - _exact(right)).square().flatten(1).mean(dim=1, dtype=torch.float64)


def mean_distance(left: Tensor, right: Tensor) -> Tensor:
    """w = mean over dims of |left - right|, detached, both [M, ...] -> [M] float64, at least 1e-5.

    >>> mean_distance(torch.zeros(1, 2, 2), torch.full((1, 2, 2), -0.5)).tolist()
    [0.5]
    """
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

    The error is l [M] float64, sigma [M]; `power` is p of `ghuber`: 1 is `sigma`, 0.5 twice `huber`. The Huber forms
    bound the push of a negative advantage, whose weight falls as l grows.

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
    """1 / (2 s^2) with the Flow-SDE's s = a sqrt(sigma / (1 - sigma)), sigma at most 0.99; [M] float64.

    >>> elbo_weight(torch.tensor([0.5]), noise_level=1.0).tolist()
    [0.5]
    """
    sigma = sigma.double()
    return (1 - sigma.clamp(max=0.99)) / (2 * noise_level**2 * sigma)


# ---- two implicit policies: DiffusionNFT


def optimality(advantage: Tensor, bound: float) -> Tensor:
    """Probability [M] in [0, 1] that a sample is a good one: A clipped to +-bound, mapped linearly.

    >>> optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 9.0]), 5.0).tolist()
    [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]
    """
    return (advantage / (2 * bound) + 0.5).clamp(0, 1)


def negative_aware_loss(
    policy: Tensor, old: Tensor, clean: Tensor, good: Tensor, mix: float, *, adaptive: bool = True
) -> Tensor:
    """(r L+ + (1 - r) L-) / beta, per row: the good half of the data pulls the policy, the bad half its mirror image.

        x+ = beta x + (1 - beta) x_old      x- = (1 + beta) x_old - beta x      L = mean (x+- - x0)^2 / w
        w = mean |x+- - x0|, without gradient

    Clean predictions are affine in velocities, so this is the same with v in place of x. `policy` is its clean
    prediction x, [M, ...], `old` that of the network which drew the samples, x_old, `clean` x0, `good` r in [0, 1],
    [M], `mix` beta > 0; `adaptive` False leaves w out.

    Source: arXiv 2509.16117; NVlabs/DiffusionNFT:scripts/train_nft_sd3.py.

    >>> policy, clean = torch.full((1, 4), 0.5), torch.zeros(1, 4)
    >>> negative_aware_loss(policy, policy, clean, torch.tensor([1.0]), mix=1.0).tolist()
    [0.5]
    """
    positive, negative = mix * policy + (1 - mix) * old, (1 + mix) * old - mix * policy

    def branch(implicit: Tensor) -> Tensor:
        error = mean_square(implicit, clean)
        return error / mean_distance(implicit, clean) if adaptive else error

    good = good.double()
    return (good * branch(positive) + (1 - good) * branch(negative)) / mix


# ---- sums over groups


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Sum over the rows of the same group, at every row; values [M], group [M] int64.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 7, 3])).tolist()
    [3.0, 3.0, 4.0]
    """
    number = numbered(group)
    return torch.zeros_like(values).index_add(0, number, values)[number]


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """Mean over the rows of the same group, at every row; values [M], group [M] int64.

    >>> group_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 7, 3])).tolist()
    [1.5, 1.5, 4.0]
    """
    return group_sum(values, group) / group_sum(torch.ones_like(values), group)


# ---- whole groups: DGPO


def group_preference_weight(
    advantage: Tensor, error: Tensor, error_reference: Tensor, group: Tensor, beta: float
) -> Tensor:
    """sigmoid(beta / G * sum over the group of A (l - l_ref)), [M] without gradient: how wrong a group still stands.

    Times A l it has the gradient of -log sigmoid(-beta / G * sum A (l - l_ref)), but for the factor beta / G. A, l and
    l_ref are [M]; rows of one number in `group`, [M] int64, are one group (of G rows), at one time; `beta` is an
    inverse temperature.

    Source: arXiv 2510.08425; Luo-Yihong/DGPO:scripts/train_sd3_dgpo.py.

    >>> error, reference = torch.tensor([0.2, 0.5]).double(), torch.tensor([0.2, 0.5]).double()
    >>> group_preference_weight(torch.tensor([1.0, -1.0]), error, reference, torch.tensor([7, 7]), 100.0).tolist()
    [0.5, 0.5]
    """
    return torch.sigmoid(beta * group_mean((advantage.double() * (error - error_reference)).detach(), group))


def overshot(error: Tensor, error_old: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Terms that have moved far enough, [M] bool: exp(l_old - l) above 1 + c where A > 0, below 1 - c elsewhere.

    >>> overshot(torch.tensor([0.1, 0.1]), torch.tensor([0.3, 0.3]), torch.tensor([1.0, -1.0]), 0.01).tolist()
    [True, False]
    """
    ratio = (error_old - error.detach()).exp()
    return torch.where(advantage > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)


# ---- rewards that the policy implies: CRD


def implicit_reward(policy: Tensor, old: Tensor, target: Tensor, *, adaptive: bool = True) -> Tensor:
    """l_old / w_old - l / w, [M] float64: log p / p_old by matching errors of outputs [M, ...].

    w = mean |v - v*| without gradient, or 1.

    >>> target = torch.zeros(1, 4)
    >>> implicit_reward(target + 0.5, target + 1, target, adaptive=False).tolist()
    [0.75]
    """

    def error(output: Tensor) -> Tensor:
        value = mean_square(output, target)
        return value / mean_distance(output, target) if adaptive else value

    return error(old) - error(policy)


def centred(values: Tensor, group: Tensor, weight: Tensor) -> Tensor:
    """values - sg(weighted mean of the group), [M]; `weight` [M] sums to 1 over each group.

    Centring takes log Z(c) away, which is one constant per prompt.

    >>> centred(torch.tensor([1.0, 3.0]), torch.tensor([7, 7]), torch.tensor([0.5, 0.5])).tolist()
    [-1.0, 1.0]
    """
    return values - group_sum((weight * values).detach(), group)


def pool_weights(given: Tensor, advantage: Tensor, group: Tensor, pools: float | None) -> list[Tensor]:
    """Weights for `centred`, each [M] and of sum 1 over the group; an empty pool is the whole group.

    `given` is r [M] float64, `advantage` A [M], `group` [M] int64. `pools` None: one, all alike; 0: the samples of
    A > 0 and those of A < 0; above 0: softmax of r and of -r at this temperature.

    >>> given, advantage = torch.tensor([0.9, 0.5, 0.1]).double(), torch.tensor([4.0, 0.0, -4.0])
    >>> [weights.tolist() for weights in pool_weights(given, advantage, torch.tensor([7, 7, 7]), 0.0)]
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    everyone = torch.ones_like(given)
    if pools is None:
        masses = [everyone]
    elif pools == 0:
        masses = [(advantage > 0).to(given), (advantage < 0).to(given)]
    else:
        masses = [(given / pools).exp(), (-given / pools).exp()]
    totals = [group_sum(mass, group) for mass in masses]
    whole = everyone / group_sum(everyone, group)
    return [
        torch.where(total > 0, mass / total.clamp(min=1e-300), whole)
        for mass, total in zip(masses, totals, strict=True)
    ]


def reward_fit(implied: Tensor, given: Tensor, how: RewardFit) -> Tensor:
    """Loss of centred rewards, [M]: `mse` (R' - r')^2, or `bce`, the cross-entropy of R' with sigmoid(r').

    Source: arXiv 2603.14128; X-GenGroup/Flow-Factory:trainers/crd.py.

    >>> reward_fit(torch.tensor([2.0]), torch.tensor([0.5]), "mse").tolist()
    [2.25]
    """
    if how == "mse":
        return (implied - given).square()
    return binary_cross_entropy_with_logits(implied, given.sigmoid(), reduction="none")


# ---- regression to a target


def matched_target(reference: Tensor, old: Tensor, target: Tensor, advantage: Tensor, strength: float) -> Tensor:
    """v_ref + m A (v* - v_old), [M, ...]: the adjoint at the clean sample, moved along the path to (x, sigma).

    Source: arXiv 2605.10759.

    >>> reference, old, target = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)
    >>> matched_target(reference, old, target, torch.tensor([0.5]), strength=1.0).tolist()
    [[0.5, 0.5]]
    """
    return reference + expand((strength * advantage).to(reference), reference) * (target - old)


def softmax_weights(rewards: Tensor, temperature: float) -> Tensor:
    """exp(r / tau) over its sum in the group: rewards [P, G], NaN masked with weight 0; [P, G] float64. (RWR)

    >>> softmax_weights(torch.tensor([[1.0, 1.0, float("nan")]]), 0.5).tolist()
    [[0.5, 0.5, 0.0]]
    """
    logits = (rewards.double() / temperature).masked_fill(~rewards.isfinite(), -torch.inf)
    return logits.softmax(dim=1).nan_to_num(0.0)
