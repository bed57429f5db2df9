"""Images as CLIP-like networks want them: a normalised square. A helper, not a reward.

Source: openai/CLIP (shortest side by bicubic, centre crop); transformers' CLIPImageProcessor and SiglipImageProcessor;
mlfoundations/open_clip:src/open_clip/transform.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from flowrl.rewards._vision.arrays import eight_bit, finite
from flowrl.rewards._vision.pool import stacked
from PIL import Image
from torch import Tensor

from flowrl.reward import Images

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
Preprocess = Literal["exact", "fast"]
"""8-bit PIL as the published scores were made, or float tensors, through which gradients flow."""
Fit = Literal["crop", "pad", "squash"]
Interpolation = Literal["bicubic", "bilinear"]
_PIL = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_SEEN = {"crop": "the centre square", "pad": "the whole image between bars", "squash": "stretched to a square"}


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The way of one network from images in [0, 1] to its input.

    "fast" differs from "exact" by rounding to 8 bits, and at hard edges by the kernel's overshoot between its passes.
    """

    size: int
    preprocess: Preprocess = "exact"
    fit: Fit = "crop"
    """"crop": shortest side to `size`, then the centre; "pad": longest side, then bars; "squash": both sides."""
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    interpolation: Interpolation = "bicubic"
    fill: float = 0.0
    """Grey of the bars, before normalisation."""
    half_even_crop: bool = False
    """Half a pixel of a crop's margin is rounded half to even, as torchvision does, not down, as transformers does."""
    threads: int = 1
    """Threads that prepare a batch where it is "exact"; the result is the same for any number."""

    @property
    def resolution(self) -> str:
        """For the card."""
        return f"{self.size} x {self.size}, {_SEEN[self.fit]}"

    def __call__(self, images: Images) -> Tensor:
        """[B, 3, size, size]; NaN all over where an image holds NaN or inf."""
        return stacked(self._one, images, self.threads if self.preprocess == "exact" else 1)

    def _one(self, image: Tensor) -> Tensor:
        resize = self._exactly if self.preprocess == "exact" else self._fast
        if image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(f"an image must be [3, H, W], got {list(image.shape)}")
        # Tested first: a crop or a clamp could hide it.
        if not finite(image):
            return broken(image, self.size, self.preprocess)
        height, width = image.shape[-2:]
        resized = resize(image, resized_shape(height, width, self.size, self.fit))
        if self.fit == "crop":
            resized = self._centre(resized)
        elif self.fit == "pad":
            resized = padded(resized, self.size, self.fill)
        return normalised(resized, self.mean, self.std)

    def _exactly(self, image: Tensor, shape: tuple[int, int]) -> Tensor:
        height, width = shape
        resized = Image.fromarray(eight_bit(image)).resize((width, height), _PIL[self.interpolation])
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255

    def _fast(self, image: Tensor, shape: tuple[int, int]) -> Tensor:
        resized = F.interpolate(image[None].float(), shape, mode=self.interpolation, antialias=True)[0]
        # PIL works on 8 bits and so cuts off the overshoot of the bicubic kernel.
        return resized.clamp(0, 1)

    def _centre(self, pixels: Tensor) -> Tensor:
        margins = [side - self.size for side in pixels.shape[-2:]]
        top, left = (round(m / 2) if self.half_even_crop else m // 2 for m in margins)
        return pixels[..., top : top + self.size, left : left + self.size]


def broken(image: Tensor, size: int, preprocess: Preprocess) -> Tensor:
    """[3, size, size] of NaN for an image that is not finite, where the others of its batch are: PIL's in memory."""
    return torch.full((3, size, size), torch.nan, device="cpu" if preprocess == "exact" else image.device)


def resized_shape(height: int, width: int, size: int, fit: Fit) -> tuple[int, int]:
    """(height, width) before the crop or the bars.

    The free side of a crop is rounded down, that of bars half to even, as the published code does.

    >>> resized_shape(480, 832, 224, "crop"), resized_shape(480, 832, 224, "pad")
    ((224, 388), (129, 224))
    """
    if fit == "squash":
        return size, size
    if fit == "crop":
        longer = int(size * max(height, width) / min(height, width))
        return (size, longer) if height <= width else (longer, size)
    scale = size / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def margins(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Bars around an image that becomes a square of `size`: left, top, right, bottom; an odd pixel goes last.

    >>> margins(149, 224, 224)
    (0, 37, 0, 38)
    """
    left, top = (size - width) // 2, (size - height) // 2
    return left, top, size - width - left, size - height - top


def padded(pixels: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[3, size, size] of [3, H, W] within it, between bars of `fill`."""
    height, width = pixels.shape[-2:]
    left, top, right, bottom = margins(height, width, size)
    return F.pad(pixels, (left, right, top, bottom), value=fill)


def normalised(pixels: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """(pixels - mean) / std by channel, [3, H, W]."""
    centre, width = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (mean, std))
    return (pixels - centre) / width
