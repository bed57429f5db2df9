"""The std of images inside a group, which says whether the samples of a prompt have become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.core.eight_bits import EightBitImages
from flowrl.core.tensors import ints

_VALUES = 2**22
"""Values of a sample that are summed together, so that a group of videos takes no more memory than one of images."""


def group_image_std(images: EightBitImages, rows: Tensor, device: torch.device | str = "cpu") -> float:
    """Mean over prompts of the std of pixels over the group's samples, in [0, 0.5]; near 0 means collapse.

    Samples that are not finite are left out; NaN where none is left.

    Args:
        images: of B samples.
        rows: numbers of their prompts, [B].
        device: where the sums are made: whole numbers, so the same everywhere.
    """
    stds: list[Tensor] = []
    for row in rows.unique():
        own = ((rows == row) & images.finite).nonzero().flatten()
        if len(own):
            stds.append(_pixel_std(images.levels.flatten(1), ints(own), device))
    return float(torch.stack(stds).mean()) if stds else torch.nan


def _pixel_std(levels: Tensor, own: Sequence[int], device: torch.device | str) -> Tensor:
    """Mean over N values of their std over the samples `own` of levels [B, N] uint8, as a share of 255; float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in levels.split(_VALUES, dim=1):
        sums = torch.zeros(part.shape[1], dtype=torch.int32, device=device)
        squares = torch.zeros_like(sums)  # 255^2 n: exact for groups of up to 33,000
        for row in own:
            value = part[row].to(device, torch.int32)
            sums += value
            squares.addcmul_(value, value)
        total += (len(own) * squares.long() - sums.long().square()).double().sqrt().sum()
    return total / (255 * len(own) * levels.shape[1])
