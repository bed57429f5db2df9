"""Images prepared in a few threads next to a GPU, in their order. A helper, not a reward."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_MOST = 8


def threads(device: torch.device) -> int:
    """Threads that prepare images for a network on `device`: one for the CPU, whose cores are at work already.

    For a GPU its process's share of the cores, without the one that asks it for work; 8 at most.
    """
    if device.type != "cuda":
        return 1
    # Set by torchrun: the processes of this machine.
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST, share - 1))


def stacked(prepare: Callable[[Tensor], Tensor], images: Sequence[Tensor] | Tensor, count: int) -> Tensor:
    """`prepare` of every image in one tensor [B, ...], in their order, by `count` threads."""
    if count == 1 or len(images) < 2:
        return torch.stack([prepare(image) for image in images])
    with ThreadPoolExecutor(min(count, len(images)), "flowrl-images") as pool:
        return torch.stack(list(pool.map(prepare, images)))
