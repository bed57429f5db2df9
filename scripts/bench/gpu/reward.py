"""A reward that takes no time: every sample has the same value. What is measured draws its own rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.reward import Card, Images

CARD = Card(outputs=("none",), modality="any", source="scripts.bench")


def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
    return torch.zeros(len(images))
