"""Size of the image as a JPEG: a reward without weights, whose optimum under compression is a flat image.

A video's is the mean over its frames, so that a number means the same for images and videos of any length.

Source: DDPO, arXiv:2305.13301; kvablack/ddpo-pytorch:ddpo_pytorch/rewards.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from flowrl.rewards._vision.arrays import jpeg, to_uint8
from torch import Tensor

from flowrl.reward import Card, Images, Reward

LEVEL = "tested"
CARD = Card(
    outputs=("jpeg_kb",),
    low=0.0,
    higher_is_better=False,
    modality="any",
    resolution="every pixel",
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="DDPO, arXiv:2305.13301",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    mode: Literal["compressibility", "incompressibility"] = "compressibility"
    """The better direction: smaller files or larger ones. The raw value is the size either way."""
    quality: int = 95
    """JPEG quality, 1 to 95. Sizes differ by a few bytes between builds of libjpeg."""

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(f"quality={self.quality} must be from 1 to 95, the range PIL recommends")


def jpeg_kilobytes(pixels: np.ndarray, quality: int) -> float:
    """Thousands of bytes of an [H, W, 3] uint8 image as a JPEG."""
    return len(jpeg(pixels, quality)) / 1000


def build(config: Config) -> Reward:
    def one(image: Tensor) -> float:
        if image.ndim == 4:
            return fmean(one(frame) for frame in image)  # NaN stays
        pixels = to_uint8(image)
        return math.nan if pixels is None else jpeg_kilobytes(pixels, config.quality)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return torch.tensor([one(image) for image in images])

    return Reward(score, replace(CARD, higher_is_better=config.mode == "incompressibility"))
