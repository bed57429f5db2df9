"""Randomness keyed by identity: the same draw whichever rank, batch or order asks for it.

Keys are (seed, purpose, ...): iteration, slot, sample, step, branch as the purpose needs them. Rank
and batch position never enter, so noise does not depend on the layout of a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for one draw.

    >>> derive(0, "noise", 1, 2) == derive(0, "noise", 1, 2)
    True
    >>> derive(0, "noise", 1, 2) == derive(0, "noise", 12)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *key: int) -> torch.Generator:
    """A CPU generator for one draw; CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive(seed, purpose, *key))


def normal(shape: Sequence[int], seed: int, purpose: str, keys: Sequence[Sequence[int]]) -> Tensor:
    """Standard normal noise, [len(keys), *shape] float32, one independent draw per key."""
    out = torch.empty(len(keys), *shape)
    for row, key in zip(out, keys, strict=True):
        row.normal_(generator=generator(seed, purpose, *key))
    return out


def permutation(count: int, seed: int, purpose: str, *key: int) -> Tensor:
    """A random order of range(count), [count] int64."""
    return torch.randperm(count, generator=generator(seed, purpose, *key))
