"""Pure losses. Nothing here knows a model; everything is per row until the caller sums.

Likelihood methods have a ratio. Forward-process methods have matching errors on re-noised clean samples:

    x = alpha x0 + sigma eps     v* what the network should output there     l = mean over dims of (v - v*)^2

Errors are taken in float32 (of float64 outputs in float64) and averaged in float64: policies differ in the last
digits of l.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.process import expand

_LEAST = 1e-5  # of self-normalising weights
_OFFSET = 1e-10  # keeps the power of an error differentiable at 0

NoiseForm = Literal["sum", "sqrt", "mean"]
ErrorWeighting = Literal["uniform", "sigma", "sigma2", "huber", "ghuber"]
Anchor = Literal["sign", "indicator", "loser"]
Utility = Literal["kahneman_tversky", "loss_averse", "risk_seeking"]


Bounds = tuple[float, float] | tuple[Tensor, Tensor]
"""How far a ratio may fall and rise; tensors are shaped like the ratio."""


def clipped_ratio_loss(log_ratio: Tensor, advantages: Tensor, clip_range: Bounds) -> tuple[Tensor, Tensor]:
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


# ---- the law of the initial noise: FIND


def gaussian_log_prob(latents: Tensor, mean: Tensor, std: Tensor, form: NoiseForm) -> Tensor:
    """log N(latents; mean, std^2), all [M, ...] with D values a row, without its constant; [M] float64.

    sum   the density itself
    sqrt  sum / sqrt(D): after a move of the mean by d std in every value its std is d, whatever D is
    mean  sum / D: that std is d / sqrt(D)
    """
    mean, std = mean.double(), std.double()
    values = (-((latents.double() - mean) / std).square() / 2 - std.log()).flatten(1)
    count = values.shape[1]
    return values.sum(dim=1) / {"sum": 1, "sqrt": count**0.5, "mean": count}[form]


def noise_prior(mean: Tensor, std: Tensor) -> Tensor:
    """Mean over dims of mean^2 + (std - 1)^2, both [M, ...] -> [M] float64; 0 at the standard normal law."""
    return (mean.double().square() + (std.double() - 1).square()).flatten(1).mean(dim=1)


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
    number = group.unique(return_inverse=True)[1]
    sums = values.new_zeros(int(number.max()) + 1).index_add(0, number, values)
    return sums[number]


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


# ---- pairs and labels: Diffusion-DPO, SePPO, Diffusion-KTO


def pair_margin(sign: Tensor, error: Tensor, error_reference: Tensor, pair: Tensor) -> Tensor:
    """Delta = (l_w - l_ref_w) - (l_l - l_ref_l) of each row's pair, [M]: below 0 the network prefers as the data do.

    Args:
        sign: +1 for a winner, -1 for a loser, [M]; 0 takes a row out.
        error: l [M].
        error_reference: l_ref [M].
        pair: [M] int64; rows of one number are one pair at one time, with one noise.
    """
    return group_sum(sign.to(error) * (error - error_reference), pair)


def preference_loss(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(-beta / 2 Delta), shaped like the margin; log 2 where the network is the reference.

    Its gradient is beta / 2 sigmoid(beta / 2 Delta) grad Delta, so beta / 4 (grad l_w - grad l_l) at the reference.

    Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py. (The paper's T omega(lambda) is in beta.)

    >>> preference_loss(torch.tensor([0.0]), 5000.0)
    tensor([0.6931])
    """
    return -logsigmoid(-beta / 2 * margin)


def anchor_sign(gain: Tensor, how: Anchor) -> Tensor:
    """What becomes of the policy's own sample, from how much better than the reference the anchor is fitted, [M].

        gain = l_ref - l on the anchor      sign       +1 it loses, -1 it wins too
                                            indicator  +1 it loses, 0 it is left out
                                            loser      always +1

    A gain of 0, at the reference itself, counts as fitted.

    Source: arXiv 2410.05255.

    >>> anchor_sign(torch.tensor([0.1, 0.0, -0.1]), "sign").tolist()
    [1.0, 1.0, -1.0]
    """
    fitted = gain.detach() >= 0
    if how == "loser":
        fitted = torch.ones_like(fitted)
    return torch.where(fitted, 1.0, -1.0 if how == "sign" else 0.0).to(gain)


def label_loss(gain: Tensor, sign: Tensor, offset: Tensor | float, beta: float, utility: Utility) -> Tensor:
    """-U(u), u = y beta (g - z), up to a constant: a label for each picture, no pairs; [M].

        kahneman_tversky  1 - sigmoid(u)        gains and losses fade, full weight near the offset
        loss_averse       -log sigmoid(u)       what is still wrong weighs most
        risk_seeking      log sigmoid(-u)       what is right already weighs most

    Args:
        gain: g = l_ref - l [M].
        sign: y, +1 for a picture that was liked and -1 for one that was not, [M].
        offset: z, what a gain is measured against.
        beta: scale of gains.
        utility: as above.

    Source: arXiv 2404.04465; jacklishufan/diffusion-kto:train_kto_sd_v1.5.py.

    >>> label_loss(torch.zeros(1), torch.ones(1), 0.0, 1000.0, "kahneman_tversky").tolist()
    [0.5]
    """
    u = sign.to(gain) * beta * (gain - offset)
    if utility == "kahneman_tversky":
        return torch.sigmoid(-u)
    return -logsigmoid(u) if utility == "loss_averse" else logsigmoid(-u)


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
