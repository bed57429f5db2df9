"""Functions of tensors whose types torch leaves open."""

import torch
from torch import Tensor


def floats(values: Tensor) -> list[float]:
    """Values [N] as numbers; a GPU is waited for once.

    >>> floats(torch.tensor([0.5, 2.0]))
    [0.5, 2.0]
    """
    return [float(value) for value in values.cpu().unbind()]


def ints(values: Tensor) -> list[int]:
    """Whole values [N] as numbers; a GPU is waited for once.

    >>> ints(torch.tensor([3, 1]))
    [3, 1]
    """
    return [int(value) for value in values.cpu().unbind()]


def distinct(values: Tensor) -> Tensor:
    """The different values of [N], ascending; a GPU is waited for.

    >>> distinct(torch.tensor([3, 1, 3, 2])).tolist()
    [1, 2, 3]
    """
    ordered = values.sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def numbered(values: Tensor) -> Tensor:
    """Number of each of [N] among the different values, ascending, [N] int64; the host does not wait for a GPU.

    >>> numbered(torch.tensor([3, 1, 3, 2])).tolist()
    [2, 0, 2, 1]
    """
    ordered, order = values.sort()
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, first.cumsum(0) - 1)


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """The values on the device. To a GPU they go through pinned memory, so that the host does not wait for it."""
    device = torch.device(device)
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def in_order(rows: Tensor, count: int) -> bool:
    """Whether `rows` [n], on the CPU, are 0 .. count - 1: to take them is to take everything.

    >>> in_order(torch.arange(3), 3), in_order(torch.tensor([0, 0, 1]), 3), in_order(torch.arange(2), 3)
    (True, False, False)
    """
    return len(rows) == count and bool((rows == torch.arange(count)).all())
