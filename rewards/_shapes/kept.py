"""Whether a video begins with the image that it was given. A helper, not a reward."""

from __future__ import annotations

from flowrl.rewards._shapes.eye import BLOB, detect
from flowrl.rewards._shapes.judged import at_most
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d

_SIDE = 32
_WINDOW = 4
"""Side of a window in cells: about that of a small object."""
_SAME, _OTHER = 0.2, 0.3
"""WebP of quality 90 and noise of std 0.05 stay below the first. An object that is 3 cells off is above the second, one
that is a cell off may be between the two."""


def difference(frame: Tensor, image: Tensor) -> float:
    """Largest root mean square difference in a window of 4 x 4 cells of two images [3, H, W] in [0, 1].

    A square image has 32 x 32 cells, as for the verifier, or its pixels where it has fewer.
    """
    height, width = frame.shape[-2:]
    stretch = max((height * width) ** 0.5 / _SIDE, 1.0)
    cells = adaptive_avg_pool2d((frame - image)[None], (round(height / stretch) or 1, round(width / stretch) or 1))
    energy = cells.square().mean(dim=1, keepdim=True)
    return float(avg_pool2d(energy, min(_WINDOW, *energy.shape[-2:]), stride=1).max().sqrt())


def _named(image: Tensor) -> list[tuple[str, str]]:
    """(shape, colour) of the objects of an image, in an order of their own."""
    return sorted((each.shape, each.color or "") for each in detect(image.numpy()) if each.shape != BLOB)


def kept(frame: Tensor, image: Tensor) -> float:
    """Condition that the first frame [3, H, W] is the given image.

    1 where they have objects of the same shapes and colours and a `difference` of 0.2 at most; 0 where the objects are
    others (a circle and a square of one area differ by less than noise), or from a difference of 0.3 on.
    """
    return at_most(difference(frame, image), _SAME, _OTHER) if _named(frame) == _named(image) else 0.0
