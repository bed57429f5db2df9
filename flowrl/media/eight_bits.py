"""Images in 8 bits: the same values are scored, held by a run and saved as a PNG."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from flowrl.core.errors import Diverged
from flowrl.media import digests

_TOP = 255
"""The level of white."""


def eight_bit(values: Tensor) -> Tensor:
    """Values in [0, 1] of any shape as uint8, each the nearest of 256 levels; uint8 is given back as it is.

    Raises Diverged: NaN or inf, which has no level: no file is written of it. Whoever knows a reason says it before.

    >>> eight_bit(torch.tensor([0.0, 0.5, 0.999, 1.1])).tolist()
    [0, 128, 255, 255]
    """
    if values.dtype == torch.uint8:
        return values
    if not bool(values.isfinite().all()):
        raise Diverged(f"an image of {list(values.shape)} values holds NaN or inf, and is not written")
    return _rounded(values)


def _rounded(values: Tensor) -> Tensor:
    # In place on the product: an image of a video model is large.
    return (values.detach().float() * _TOP).round_().clamp_(0, _TOP).byte()


def unit_floats(levels: Tensor) -> Tensor:
    """The float32 values in [0, 1] of uint8 levels; floats are given back in float32.

    >>> unit_floats(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """
    return levels.float().div_(_TOP) if levels.dtype == torch.uint8 else levels.float()


class EightBitImages(Sequence[Tensor]):
    """Images or videos in 8 bits: a quarter of the bytes of float32.

    An item is a copy in floats, [3, H, W] or [F, 3, H, W] in [0, 1]; NaN all over where the sample is not finite.
    `levels` are [B, 3, H, W] or [B, F, 3, H, W] uint8; `finite` [B] bool: samples whose latents and images are finite;
    the levels of the others mean nothing.
    """

    def __init__(self, levels: Tensor, finite: Tensor) -> None:
        if levels.dtype != torch.uint8 or finite.shape != levels.shape[:1]:
            raise ValueError(f"levels must be uint8 [B, ...] and finite [B], got {levels.dtype} {list(levels.shape)}")
        self.levels, self.finite = levels, finite

    def __len__(self) -> int:
        return len(self.levels)

    @overload
    def __getitem__(self, rows: int) -> Tensor: ...

    @overload
    def __getitem__(self, rows: slice) -> "EightBitImages": ...

    def __getitem__(self, rows: int | slice) -> "Tensor | EightBitImages":
        if isinstance(rows, slice):
            return EightBitImages(self.levels[rows], self.finite[rows])
        return self.pick([range(len(self))[rows]]).floats()[0]

    def pick(self, rows: Sequence[int]) -> "EightBitImages":
        """The images of some rows, copied."""
        return EightBitImages(self.levels[list(rows)], self.finite[list(rows)])

    def floats(self) -> Tensor:
        """A copy of all of them in floats, [B, 3, H, W] or [B, F, 3, H, W]."""
        result = unit_floats(self.levels)
        if not bool(self.finite.all()):
            result[~self.finite] = torch.nan
        return result

    def digests(self) -> list[str]:
        """`digests.of` each sample; "" for one that is not finite."""
        known = zip(self.levels.numpy(), self.finite.numpy(), strict=True)
        return [digests.of(levels) if finite else "" for levels, finite in known]


class Album:
    """Images of `count` samples that come batch by batch, in one tensor of 8 bits that the first batch allocates."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0
        self._images: EightBitImages | None = None

    def add(self, images: Tensor, finite: Tensor) -> EightBitImages:
        """Round the next images [b, ...] where they are and keep them on the CPU; they, as a part of the whole.

        `finite` [b] as in `EightBitImages`.
        """
        if self._images is None:
            levels = torch.zeros((self.count, *images.shape[1:]), dtype=torch.uint8)
            self._images = EightBitImages(levels, torch.ones(self.count, dtype=torch.bool))
        part = self._images[self.done : self.done + len(images)]
        if len(part) < len(images):
            raise ValueError(f"{self.done + len(images)} images came, and {self.count} were to come")
        part.levels.copy_(images if images.dtype == torch.uint8 else _rounded(images))
        part.finite.copy_(finite)
        self.done += len(images)
        return part

    def whole(self) -> EightBitImages:
        """All images. Raises ValueError: some have not come."""
        if self._images is None or self.done < self.count:
            raise ValueError(f"{self.done} of {self.count} images have come")
        return self._images
