"""Signs of an image that has died, at no cost: to be watched, with `weight: 0`, beside what is trained on.

    degenerate                  1 where the image is near black, near white or near constant, else 0
    degeneracy_black            1 where its mean luminance is below `black`
    degeneracy_flat             1 where the standard deviation of its luminance is below `flat`
    degeneracy_saturation       mean saturation of its pixels, (max - min) / max of the three colours, 0 for black
    degeneracy_high_frequency   share of the luminance's energy at more than a quarter of a cycle a pixel, the mean
                                taken off: 0 for what is smooth or constant, 3/4 for noise, 1 for a checkerboard

Their means over a batch are the fractions to watch: rewards of preference pull saturation up, and grids and
checkerboards raise the high frequencies before they are seen (yifan123/flow_grpo#233, #167). Of a video, means over
eight frames. Luminance is Rec. 709's of the stored values; images are taken as saved, in 8 bits.

Source: this project, after the reports of users of Flow-GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flowrl.rewards._vision.arrays import to_uint8
from flowrl.rewards._vision.frames import framewise
from torch import Tensor

from flowrl.reward import Card, Images, Reward

_LUMINANCE = (0.2126, 0.7152, 0.0722)
_FRAMES = 8

LEVEL = "tested"
CARD = Card(
    outputs=(
        "degenerate",
        "degeneracy_black",
        "degeneracy_flat",
        "degeneracy_saturation",
        "degeneracy_high_frequency",
    ),
    low=0.0,
    high=1.0,
    higher_is_better=False,
    modality="any",
    resolution="every pixel",
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="yifan123/flow_grpo#167, #233",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    black: float = 0.03
    """Mean luminance below which an image is near black, and above 1 less it near white, in [0, 1]."""
    flat: float = 0.02
    """Standard deviation of the luminance below which an image is near constant, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.black < 0.5:
            raise ValueError(f"black={self.black} must be at least 0 and below 0.5")
        if not 0 <= self.flat <= 1:
            raise ValueError(f"flat={self.flat} must be from 0 to 1")


def saturation(pixels: Tensor) -> float:
    """Mean of (max - min) / max over the pixels of [3, H, W] in [0, 1].

    >>> saturation(torch.tensor([1.0, 0.5, 0.5]).view(3, 1, 1))
    0.5
    """
    most, least = pixels.amax(dim=0), pixels.amin(dim=0)
    return torch.where(most > 0, (most - least) / most.clamp(min=1e-9), 0.0).mean().item()


def high_frequency(luminance: Tensor) -> float:
    """Share of the energy of [H, W], its mean taken off, above a quarter of a cycle a pixel in either direction."""
    height, width = luminance.shape
    energy = torch.fft.fft2(luminance.double() - luminance.double().mean()).abs().square()
    total = energy.sum()
    # A constant leaves the rounding of its mean.
    if total <= 1e-12 * luminance.numel() ** 2:
        return 0.0
    rows, columns = torch.fft.fftfreq(height).abs(), torch.fft.fftfreq(width).abs()
    high = (rows[:, None] > 0.25) | (columns[None] > 0.25)
    return (energy[high].sum() / total).item()


def build(config: Config) -> Reward:
    def one(image: Tensor) -> tuple[float, ...]:
        values = to_uint8(image)
        if values is None:
            return (math.nan,) * len(CARD.outputs)
        pixels = torch.from_numpy(values).permute(2, 0, 1).float() / 255
        luminance = torch.einsum("c,chw->hw", torch.tensor(_LUMINANCE), pixels)
        mean = luminance.mean().item()
        black, flat = mean < config.black, luminance.std(correction=0).item() < config.flat
        dead = black or flat or mean > 1 - config.black
        return float(dead), float(black), float(flat), saturation(pixels), high_frequency(luminance)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        table = torch.tensor([one(image) for image in images], dtype=torch.float32)
        return dict(zip(CARD.outputs, table.unbind(dim=1), strict=True))

    return Reward(framewise(score, _FRAMES), CARD)
