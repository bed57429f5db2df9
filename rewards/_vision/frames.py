"""Rewards of images on videos: the mean over some of the frames. A helper, not a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowrl.reward import Images, ScoreFunction


def frame_indices(total: int, count: int) -> list[int]:
    """Indices of `count` of `total` frames that stand for a video: the middle one of each of `count` equal stretches.

    All of them where there are no more than `count`.

    Raises:
        ValueError: there is no frame, or none is asked for.

    >>> frame_indices(81, 4), frame_indices(3, 8), frame_indices(5, 1)
    ([10, 30, 50, 70], [0, 1, 2], [2])
    """
    if total < 1:
        raise ValueError(f"a video of {total} frames cannot be scored")
    if count < 1:
        raise ValueError(f"{count} frames of a video cannot be scored; take 1 at least")
    used = min(total, count)
    return [(2 * i + 1) * total // (2 * used) for i in range(used)]


def framewise(score: ScoreFunction, frames: int, *, chunk: int = 64) -> ScoreFunction:
    """A reward of images [3, H, W] as one of images and videos [F, 3, H, W], mixed as they come.

    A video has the mean over `frames` of its frames (`frame_indices`), each scored with its prompt and metadata;
    NaN if any of them is NaN. Gradients flow through the mean.

    Args:
        score: takes images in a list; returns [n] or {output: [n]}.
        frames: how many frames of a video are looked at.
        chunk: how many images `score` is handed at once, at most.
    """

    def of_all(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | Mapping[str, Tensor]:
        taken = [_images(image, frames) for image in images]
        rows = [row for row, pieces in enumerate(taken) for _ in pieces]
        flat = [piece for pieces in taken for piece in pieces]
        parts = []
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            batch = flat[start : start + chunk]
            parts.append(score(batch, [prompts[row] for row in part], [metadata[row] for row in part]))
        counts = [len(pieces) for pieces in taken]
        if parts and isinstance(parts[0], Mapping):
            return {name: _means([part[name] for part in parts], counts) for name in parts[0]}
        return _means(parts, counts)

    return of_all


def _images(image: Tensor, frames: int) -> list[Tensor]:
    """The image itself, or the frames that stand for a video."""
    if image.ndim == 3:
        return [image]
    if image.ndim != 4:
        raise ValueError(f"an image must be [3, H, W] and a video [F, 3, H, W], got {list(image.shape)}")
    return [image[index] for index in frame_indices(len(image), frames)]


def _means(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Mean of each run of `counts` values, [B]."""
    if not counts:
        return torch.empty(0)
    return torch.stack([run.mean() for run in torch.cat(list(parts)).split(list(counts))])
