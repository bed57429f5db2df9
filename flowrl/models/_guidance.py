"""Classifier-free guidance, for families whose network does not embed it."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition

Forward = Callable[[Tensor, Tensor, Condition], Tensor]
"""x [B, ...], timestep [B], B conditions -> network output [B, ...]."""
Forwards = Literal["joined", "separate", "detached"]
"""The two branches of guidance: one forward of a doubled batch (unconditional half first); two forwards, for texts of
different lengths and for latents too large to fit twice; or two, the unconditional one without gradient."""


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
    forwards: Forwards = "joined",
) -> Tensor:
    """Classifier-free guidance; as in diffusers, guidance_scale <= 1 means none.

    Detached, the gradient is that of `combine` with a constant unconditional output: s dc for u + s (c - u). The value
    is that of separate forwards with and without gradient, so a rollout and its replay have the same batches.

    x is [B, ...], `timestep` [B], `cond` has B rows, `unconditional` one; `guidance_scale` is s. `combine`:
    (unconditional output, conditional output, s) -> output, each [B, ...]. `forwards`: how the two branches are
    evaluated, and whether both carry gradient.

    Raises ModelError: `unconditional` is None.
    """
    if guidance_scale <= 1:
        return forward(x, timestep, cond)
    if unconditional is None:
        raise ModelError("guidance needs the embedding of the empty prompt: call encode() first")
    rows = unconditional.repeated(len(x))
    if forwards == "joined":
        output = forward(torch.cat([x, x]), torch.cat([timestep, timestep]), Condition.collate([rows, cond]))
        negative, positive = output.chunk(2)
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and forwards == "separate"):
            negative = forward(x, timestep, rows.contiguous())
        positive = forward(x, timestep, cond)
    return combine(negative, positive, guidance_scale)
