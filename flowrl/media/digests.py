"""Digests of samples in 8 bits, by which two evaluations tell which of their images are the same, kept or not."""

import hashlib
from typing import Any

import numpy as np


def of(levels: np.ndarray) -> str:
    """Digest of an image [3, H, W] or a video [F, 3, H, W], uint8: 16 hexadecimal digits."""
    digest = hashlib.blake2b(str(levels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(levels).data)
    return digest.hexdigest()


def table(known: Any, prompts: int, seeds: int) -> np.ndarray:
    """The digests in an evaluation's record, [P, S] of text. Raises ValueError: a table of another shape."""
    result = np.asarray(known, dtype=np.str_).reshape(prompts, -1 if prompts else seeds)
    if result.shape != (prompts, seeds):
        raise ValueError(f"digests is {list(result.shape)} for {prompts} prompts and {seeds} seeds")
    return result


def same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether samples are equal in 8 bits by their digests [P, S], bool [P, S].

    >>> same(np.asarray([["a", ""]]), np.asarray([["a", ""]]))
    array([[ True, False]])
    """
    return (one == other) & (one != "")
