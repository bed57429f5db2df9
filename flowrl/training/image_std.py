"""The std of images inside a group, which says whether the samples of a prompt have become one."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from flowrl.core.tensors import floats, ints
from flowrl.media.eight_bits import EightBitImages
from flowrl.training.world import World

_VALUES = 2**22
"""Values of a sample that are summed together, so that a group of videos takes no more memory than one of images."""


def group_image_std(
    images: EightBitImages, groups: Tensor, device: torch.device | str = "cpu", world: World | None = None
) -> float:
    """Mean over prompts of the std of pixels over the group's samples, in [0, 0.5]; near 0 means collapse.

    Samples that are not finite are left out; NaN where none is left. A group that several processes share counts with
    the stds of its parts, weighted by their samples. `groups`: numbers of their groups, [B], in all processes the same
    for the same group. The sums are made on the device: whole numbers, so the same everywhere. `world`: the processes
    whose samples count; None: this one.
    """
    places = {group: ints(((groups == group) & images.finite).nonzero().flatten()) for group in ints(groups.unique())}
    places = {group: own for group, own in places.items() if own}
    levels = images.levels.flatten(1)
    stds = floats(torch.stack([_pixel_std(levels, own, device) for own in places.values()])) if places else []
    parts = [(group, len(own), std) for (group, own), std in zip(places.items(), stds, strict=True)]
    sizes: dict[int, int] = defaultdict(int)
    sums: dict[int, float] = defaultdict(float)
    for group, size, std in chain(*([parts] if world is None else world.gather(parts))):
        sizes[group] += size
        sums[group] += size * std
    return fmean(sums[group] / sizes[group] for group in sorted(sizes)) if sizes else math.nan


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
