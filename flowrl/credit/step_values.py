"""Credit of a chain's steps by what each adds to the value of its latents, beside the credit of the sample.

    gain of step k = value(x_{k+1}, sigma_{k+1}) - value(x_k, sigma_k), a logit of a judge of latents
    A(k) = A + weight * (the gains of step k compared over the group by the rule that compares the rewards)

Source: this project, after the process reward of Euphonium, arXiv 2602.04928, which compares the values themselves.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages, RuleConfig, advantages


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """Credit of every trained step by a judge of latents."""

    output: str
    """Of an entry of `rewards` that judges latents, clean and noisy."""
    weight: float = 1.0
    """Of a step's credit beside that of its sample."""
    of: Literal["gain", "value"] = "gain"
    """What is compared: what the step adds, or the value of the latents before it (Euphonium)."""

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(f"weight={self.weight} must be positive")


def by_gains(credit: Advantages, gains: Tensor, rule: RuleConfig, weight: float) -> Advantages:
    """Credit by step from that of the samples and the gains of their steps [P, G, K]; a step without one is left out.

    A group that is dead by its rewards stays so.
    """
    one, bounded = torch.ones(1), replace(rule, history=None, virtual_best=0)
    own = [advantages(gains[None, :, :, k], one, bounded).values[:, :, 0] for k in range(gains.shape[2])]
    steps = credit.values.sum(dim=2)[:, :, None] + weight * torch.stack(own, dim=2)
    pruned = gains.isnan() | ~credit.kept[:, :, None]
    return replace(credit, steps=torch.where(pruned, torch.nan, steps).float(), pruned=pruned)
