"""Functions of tensors whose types torch leaves open."""

from __future__ import annotations

import torch
from torch import Tensor


def floats(values: Tensor) -> list[float]:
    """Values [N] as numbers.

    >>> floats(torch.tensor([0.5, 2.0]))
    [0.5, 2.0]
    """
    return [float(value) for value in values.unbind()]


def ints(values: Tensor) -> list[int]:
    """Whole values [N] as numbers.

    >>> ints(torch.tensor([3, 1]))
    [3, 1]
    """
    return [int(value) for value in values.unbind()]


def distinct(values: Tensor) -> Tensor:
    """The different values of [N], ascending.

    >>> distinct(torch.tensor([3, 1, 3, 2])).tolist()
    [1, 2, 3]
    """
    ordered = values.sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]
