"""Signs of images that have degenerated, and the diversity of a prompt's images, from the files of an evaluation.

Dark, flat, saturation and high frequencies are those of the reward `degeneracy`; repeated tiles and edge density are
added here. Diversity is the image std of `training/image_std.py`. P prompts, S seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.core import registry
from flowrl.core.assets import table
from flowrl.media import media
from flowrl.media.eight_bits import EightBitImages, eight_bit
from flowrl.training.image_std import group_image_std

_LUMINANCE = (0.2126, 0.7152, 0.0722)
_PARTS = (2, 3, 4)
"""Repeats across an image that are looked for."""
_TABLES = table(Path(__file__).with_suffix(".yaml"))
WORDS: dict[str, str] = _TABLES["words"]
"""Sign -> its name in a sentence."""
SHARES, RISING = tuple(_TABLES["shares"]), tuple(_TABLES["rising"])
"""Signs that are 0 or 1 for an image, so that their mean is a share; those that are bad news only where they rise."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of the kept images of an evaluation."""

    values: dict[str, np.ndarray]
    """Sign -> [N] float64, one value an image; NaN: it does not apply."""
    image_std: np.ndarray
    """Image std of each prompt with two images or more, [P] float64, NaN for the others."""


def signs_of(folder: Path, slots: Sequence[int], seeds: int) -> Signs | None:
    """Signs of the images of P prompts and S seeds in the folder of an evaluation; None: it has kept none."""
    reward = registry.load("rewards", "degeneracy")
    scorer = reward.build(reward.Config())
    rows: dict[str, list[float]] = {name: [] for name in WORDS}
    stds = np.full(len(slots), np.nan)
    for place, slot in enumerate(slots):
        files = [file for seed in range(seeds) if (file := media.find(folder / f"{slot:05d}-{seed}")) is not None]
        if not files:
            continue
        images = [media.read(file) for file in files]
        known = scorer.score(images, [""] * len(images), [{}] * len(images))
        for name, values in known.items():
            if name in rows:
                rows[name] += values.double().tolist()
        rows["repeated_tiles"] += [repeated_tiles(luminance(image)) for image in images]
        rows["edge_density"] += [edge_density(luminance(image)) for image in images]
        if len(images) > 1 and len({image.shape for image in images}) == 1:
            levels = eight_bit(torch.stack(images))
            every = EightBitImages(levels, torch.ones(len(images), dtype=torch.bool))
            stds[place] = group_image_std(every, torch.zeros(len(images), dtype=torch.int64))
    if not rows["edge_density"]:
        return None
    return Signs({name: np.asarray(values, dtype=np.float64) for name, values in rows.items()}, stds)


def luminance(image: Tensor) -> Tensor:
    """Rec. 709's of the stored values, [H, W] or of a video's middle frame, in [0, 1]."""
    frame = image if image.ndim == 3 else image[len(image) // 2]
    return torch.einsum("c,chw->hw", torch.tensor(_LUMINANCE), frame.float())


def edge_density(values: Tensor) -> float:
    """Mean absolute difference of neighbouring pixels of [H, W], in both directions.

    >>> edge_density(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    0.5
    """
    across, down = values.diff(dim=1).abs().mean(), values.diff(dim=0).abs().mean()
    return float((across + down) / 2)


def repeated_tiles(values: Tensor) -> float:
    """Largest correlation of [H, W] with itself moved by a half, a third or a quarter of its width or height.

    1 for an image of equal tiles, near 0 for others; NaN for a constant one. The moved image is wrapped around.
    """
    centred = values.double() - values.double().mean()
    total = centred.square().sum()
    if total <= 1e-9 * values.numel():
        return float("nan")
    found = [
        (centred * centred.roll(values.shape[dim] // part, dims=dim)).sum() / total
        for dim in (0, 1)
        for part in _PARTS
        if values.shape[dim] % part == 0
    ]
    return float(torch.stack(found).max()) if found else float("nan")
