"""Distances of samples from the images that they edit.

The mean absolute difference in that of 8 x 8 cells where it is largest, in units of the same of the source through the
VAE. The place of an edit is not known, but a cell is where the image changed most; the mean of a whole image does not
see a small edit.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from flowrl.media.eight_bits import eight_bit, unit_floats
from flowrl.media.media import open_image
from flowrl.models.base import ModelAdapter

CELLS = 8
"""Along a side."""
_ROUNDING = 0.5 / 255
"""Least difference of a round trip: what 8 bits leave of a perfect one."""


def largest(one: Tensor, other: Tensor) -> float:
    """Mean absolute difference of two images [3, H, W] in [0, 1], in the cell where it is largest."""
    return float(adaptive_avg_pool2d((one - other).abs().mean(0, keepdim=True), CELLS).max())


def distance(image: Tensor, source: Tensor, trip: Tensor) -> float:
    """Of an image from its source, in round trips: `trip` is the source through the VAE; all [3, H, W] in [0, 1]."""
    return largest(image, source) / max(largest(trip, source), _ROUNDING)


class Sources:
    """Sources as the pipeline of a model fits them, with their round trips: made once each, kept in 8 bits."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self.adapter = adapter
        self.kept: dict[str, Tensor | None] = {}
        """File -> [2, 3, H, W] uint8; None: it cannot be compared."""

    def fit(self, wanted: Iterable[Sequence[str]]) -> None:
        """Fit the sources of prompts with these images; several in one prompt are none."""
        for file in {images[0] for images in wanted if len(images) == 1} - self.kept.keys():
            found = self.adapter.source_of(open_image(file))
            self.kept[file] = None if found is None else eight_bit(found).cpu()

    def distance(self, levels: Tensor, images: Sequence[str]) -> float:
        """That of a sample in 8 bits from the source of its prompt; NaN: a video, or no source that was fitted."""
        kept = self.kept.get("".join(images)) if levels.ndim == 3 else None
        return math.nan if kept is None else distance(*map(unit_floats, (levels.cpu(), *kept)))
