"""Images as the libraries that rewards use want them. A helper, not a reward."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from torch import Tensor

from flowrl.media import eight_bits


def to_uint8(image: Tensor) -> np.ndarray | None:
    """[H, W, 3] uint8 of a [3, H, W] image in [0, 1], rounded, as it would be saved; None if it holds NaN or inf."""
    values = image.detach().float().cpu()
    if values.ndim != 3 or values.shape[0] != 3:
        raise ValueError(f"an image must be [3, H, W], got {list(values.shape)}")
    return eight_bit(values) if finite(values) else None


def finite(image: Tensor) -> bool:
    """Whether an image holds neither NaN nor inf."""
    # A sum reads it once and writes nothing; that of huge finite values may be inf.
    return bool(image.detach().sum().isfinite()) or bool(image.isfinite().all())


def eight_bit(image: Tensor) -> np.ndarray:
    """[H, W, 3] uint8 of a finite image [3, H, W] in [0, 1], rounded as it would be saved."""
    return eight_bits.eight_bit(image.detach().cpu()).permute(1, 2, 0).contiguous().numpy()


def jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """An [H, W, 3] uint8 image as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=quality)
    return file.getvalue()
