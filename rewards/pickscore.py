"""PickScore: how much people prefer the image for its prompt, by a CLIP ViT-H/14 tuned on half a million choices.

raw = exp(logit_scale) * cos(image, text); about 20 to 24 for present models. CLIP sees the centre square of the
image and the first 77 tokens of the prompt. A video has the mean over some of its frames.

Source: arXiv:2305.01569; yuvalkirstain/PickScore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from flowrl.rewards._vision import clips
from flowrl.rewards._vision.frames import framewise
from flowrl.rewards._vision.options import ClipOptions
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward

LEVEL = "experimental"
CARD = Card(
    outputs=("pickscore",),
    low=-100.0,
    high=100.0,
    modality="any",
    resolution="224 x 224, the centre square",
    memory_gib=3.7,
    image_network="ViT-H-14",
    overlap_on_gpu=True,
    level=LEVEL,
    licence="MIT (code and weights)",
    source="arXiv:2305.01569",
)


@dataclass(frozen=True, kw_only=True)
class Config(ClipOptions):
    model: Annotated[str, NAME_OR_PATH] = "yuvalkirstain/PickScore_v1"
    """Weights: a folder or a hub id (4 GB in float32)."""
    tokenizer: Annotated[str, NAME_OR_PATH] = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Tokenizer: a folder or a hub id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise ValueError(f"frames={self.frames} must be at least 1")


def card_of(config: Config) -> Card:
    return replace(CARD, **config.declared)


def build(config: Config) -> Reward:
    clip = clips.load(
        config.model,
        config.tokenizer,
        device=config.device,
        preprocess=config.preprocess,
        reward="pickscore",
        dtype=config.dtype,
    )
    scale = clip.model.logit_scale.exp()

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return scale * (clip.embed_images(images) * clip.embed_texts(prompts)).sum(dim=-1)

    bounds = {"low": -float(scale), "high": float(scale)}
    card = replace(card_of(config), resolution=clip.pixels.resolution, **bounds)
    return Reward(framewise(score, config.frames), card)
