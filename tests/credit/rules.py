"""The advantage rules on tables of rewards, with the std of the group where nothing else is said."""

from typing import Any

import torch
from torch import Tensor

from flowrl.credit.advantages import AdvantageConfig, Advantages, advantages


def by(name: str, rewards: Tensor, weights: Tensor, **options: Any) -> Advantages:
    """Rewards [R, P, G] by a rule."""
    known: dict[str, Any] = {"name": name, "std": "group"}
    return advantages(rewards, weights, AdvantageConfig(**known | options))


def alone(name: str, total: Tensor, **options: Any) -> Advantages:
    """One reward [P, G] by a rule."""
    return by(name, total[None], torch.ones(1), **options)
