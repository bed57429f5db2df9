"""Losses on preferences: pairs (Diffusion-DPO, SePPO) and labels (Diffusion-KTO), per row until the caller sums.

l = matching error (`losses/matching.py`)        l_ref = that of the reference, at the same sigma and eps
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from flowrl.losses.matching import group_sum

Anchor = Literal["sign", "indicator", "loser"]
LossName = Literal["sigmoid", "smoothed", "robust", "ipo", "hinge"]
Offset = Literal["mean", "class_means"]
Utility = Literal["kahneman_tversky", "loss_averse", "risk_seeking"]


def pair_margin(sign: Tensor, error: Tensor, error_reference: Tensor, pair: Tensor) -> Tensor:
    """Delta = (l_w - l_ref_w) - (l_l - l_ref_l) of each row's pair, [M]: below 0 the network prefers as the data do.

    `sign` is +1 for a winner, -1 for a loser, 0 takes a row out; it and the errors l, l_ref are [M]. Rows of one number
    in `pair`, [M] int64, are one pair at one time, with one noise.

    >>> sign, pair = torch.tensor([1.0, -1.0]), torch.tensor([7, 7])
    >>> pair_margin(sign, torch.tensor([0.25, 0.5]), torch.tensor([0.5, 0.5]), pair).tolist()
    [-0.25, -0.25]
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


def shaped_loss(margin: Tensor, beta: float, name: LossName, flip: float = 0.0, target: float | None = None) -> Tensor:
    """The loss of a margin by its name, shaped like the margin; m = -beta / 2 Delta, L = -log sigmoid(m).

        sigmoid   L(m)
        smoothed  (1 - flip) L(m) + flip L(-m)                       stops at m = log((1 - flip) / flip)
        robust    [(1 - flip) L(m) - flip L(-m)] / (1 - 2 flip)      its mean over labels of which that share is
                                                                     wrong is L of the right ones; it never stops
        ipo       (-Delta - target)^2                                target: a margin of errors; None: m = 1/2, 1 / beta
        hinge     max(0, 1 - m)

    The margin is Delta, `beta` an inverse temperature; `flip`: share of labels that are taken to be wrong, below 1/2.

    Source: arXiv 2403.00409 (robust), 2310.12036 (ipo); huggingface/trl:trainer/dpo_trainer.py (smoothed, hinge).

    >>> at = torch.tensor([-0.8], dtype=torch.float64)  # with beta 1: m = 0.4
    >>> [round(float(shaped_loss(at, 1.0, name, 0.1)), 4) for name in ("sigmoid", "smoothed", "robust", "hinge")]
    [0.513, 0.553, 0.463, 0.6]
    """
    if name == "ipo":
        return (margin + (1 / beta if target is None else target)).square()
    if name == "hinge":
        return relu(1 + beta / 2 * margin)
    right = preference_loss(margin, beta)
    if name == "sigmoid":
        return right
    wrong = preference_loss(-margin, beta)
    if name == "smoothed":
        return (1 - flip) * right + flip * wrong
    return ((1 - flip) * right - flip * wrong) / (1 - 2 * flip)


def anchor_sign(gain: Tensor, how: Anchor) -> Tensor:
    """Sign of the policy's own sample, from how much better than the reference the anchor is fitted, [M].

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
    """-U(u), u = y beta (g - z), up to a constant: a label for each image, no pairs; [M].

        kahneman_tversky  1 - sigmoid(u)        gains and losses fade, full weight near the offset
        loss_averse       -log sigmoid(u)       what is still wrong weighs most
        risk_seeking      log sigmoid(-u)       what is right already weighs most

    `gain` is g = l_ref - l [M], `sign` y, +1 for an image that was liked and -1 for one that was not, [M]; `offset` z
    is subtracted from the gain, `beta` scales it.

    Source: arXiv 2404.04465; jacklishufan/diffusion-kto:train_kto_sd_v1.5.py.

    >>> label_loss(torch.zeros(1), torch.ones(1), 0.0, 1000.0, "kahneman_tversky").tolist()
    [0.5]
    """
    u = sign.to(gain) * beta * (gain - offset)
    if utility == "kahneman_tversky":
        return torch.sigmoid(-u)
    return -logsigmoid(u) if utility == "loss_averse" else logsigmoid(-u)


def reference_point(means: Tensor, how: Offset) -> Tensor:
    """z of `label_loss` from the means over all rows of [g, y+ g, y+, y- g, y-], [5]; y+ is 1 for what was liked.

    The plain mean is at least 0, as published; that of the classes' means has no such bound in the published code and
    may have either sign. A class that is absent has no mean, and the other's counts alone.

    >>> reference_point(torch.tensor([2.0, 0.8, 0.8, 1.2, 0.2]), "class_means").tolist()
    3.5
    """
    gain, liked, likes, disliked, dislikes = means
    if how == "mean":
        return gain.clamp(min=0)
    parts, shares = torch.stack([liked, disliked]), torch.stack([likes, dislikes])
    here = shares > 0
    return torch.where(here, parts / shares, 0.0).sum() / here.sum()
