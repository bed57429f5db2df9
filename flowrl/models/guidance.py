"""Classifier-free guidance, for families whose network does not embed it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition

Forward = Callable[[Tensor, Tensor, Condition], Tensor]
"""x [B, ...], timestep [B], B conditions -> network output [B, ...]."""


def classifier_free(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """u + s (c - u), all [B, ...]."""
    return negative + guidance_scale * (positive - negative)


def guided(
    forward: Forward,
    x: Tensor,
    timestep: Tensor,
    cond: Condition,
    unconditional: Condition | None,
    guidance_scale: float,
    *,
    combine: Callable[[Tensor, Tensor, float], Tensor] = classifier_free,
    separate: bool = False,
) -> Tensor:
    """Classifier-free guidance. Both branches carry gradient; as in diffusers, guidance_scale <= 1 means none.

    Args:
        forward: the network.
        x: latents, [B, ...].
        timestep: [B].
        cond: B rows.
        unconditional: one row.
        guidance_scale: s.
        combine: (unconditional output, conditional output, s) -> output, each [B, ...].
        separate: two forwards instead of one on a doubled batch (unconditional half first), for texts of different
            lengths and for latents too large to fit twice.

    Raises:
        ModelError: `unconditional` is None.
    """
    if guidance_scale <= 1:
        return forward(x, timestep, cond)
    if unconditional is None:
        raise ModelError("guidance needs the embedding of the empty prompt: call encode() first")
    rows = unconditional.index(torch.zeros(len(x), dtype=torch.int64))
    if separate:
        negative, positive = forward(x, timestep, rows), forward(x, timestep, cond)
    else:
        output = forward(torch.cat([x, x]), torch.cat([timestep, timestep]), Condition.collate([rows, cond]))
        negative, positive = output.chunk(2)
    return combine(negative, positive, guidance_scale)
