"""Randomness keyed by identity: a draw is the same on any rank, in any batch and order.

Keys are (seed, purpose, ...): iteration, slot, sample, step, branch as the purpose needs them. Rank
and batch position never enter, so noise does not depend on the layout of a run.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def _digest(seed: int, purpose: str, key: Sequence[int]) -> bytes:
    return hashlib.sha256("/".join([str(seed), purpose, *map(str, key)]).encode()).digest()


def derive(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for a library that takes a number.

    >>> derive(0, "noise", 1, 2) == derive(0, "noise", 1, 2)
    True
    >>> derive(0, "noise", 1, 2) == derive(0, "noise", 12)
    False
    """
    return int.from_bytes(_digest(seed, purpose, key)[:8], "big") >> 1


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Random numbers of one draw: Philox with a 128-bit key, on the CPU, so they are equal for every device.

    Not torch's CPU generator: it keeps 32 bits of its seed, so noise would repeat in a long run.
    """
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(seed, purpose, key)[:16], "big")))


def normal(shape: Sequence[int], seed: int, purpose: str, keys: Sequence[Sequence[int]]) -> Tensor:
    """Standard normal noise, [len(keys), *shape] float32, one independent draw per key."""
    out = np.empty((len(keys), *shape), dtype=np.float32)
    for row, key in zip(out, keys, strict=True):
        stream(seed, purpose, *key).standard_normal(out=row, dtype=np.float32)
    return torch.as_tensor(out)


def permutation(count: int, seed: int, purpose: str, *key: int) -> Tensor:
    """A random order of range(count), [count] int64."""
    return torch.as_tensor(stream(seed, purpose, *key).permutation(count))
