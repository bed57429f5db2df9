"""A reward of the size and the way of HPSv2 whose gradient takes its time: CLIP ViT-H/14 with random weights.

The image tower is in bfloat16, as the recipes have it; without a GPU it is a ViT-B/32 in float32, for a rehearsal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flowrl.rewards._vision import open_clips
from flowrl.rewards._vision.pixels import Pixels
from torch import Tensor

from flowrl.reward import Card, Images, Reward

CARD = Card(outputs=("random_clip",), modality="any", half_precision=True, differentiable=True, source="scripts.bench")


@dataclass(frozen=True)
class Config:
    """It has no options."""


def card_of(config: Config) -> Card:
    return CARD


def build(config: Config) -> Reward:
    cuda = torch.cuda.is_available()
    network, tokenizer = open_clips.untrained("ViT-H-14" if cuda else "ViT-B-32")
    dtype = torch.bfloat16 if cuda else torch.float32
    network.to("cuda" if cuda else "cpu").visual.to(dtype)
    clip = open_clips.OpenClip(network, tokenizer, Pixels(size=224, preprocess="fast", fit="pad"), dtype)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return (clip.embed_images(images) * clip.embed_texts(prompts)).sum(dim=-1)

    return Reward(score, CARD)
