"""How small the rewards of a run may be: the credit that they give, and the factor that mends it."""

import math

FAINT = 1e-3
"""Largest credit, where 1 is usual, below which the rewards' scale is at fault: next to `advantages.eps` (1e-4) it is
that of scores that differ by 1e-7, the rounding of float32 numbers around 1."""


def scale_up(std: float) -> float:
    """The power of ten, 1e30 at most, that brings a std near 1.

    >>> scale_up(5e-11), scale_up(1e-40)
    (10000000000.0, 1e+30)
    """
    return 10.0 ** min(-round(math.log10(std)), 30)
