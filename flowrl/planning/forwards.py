"""The network's forwards as a run makes them, on inputs without meaning: what its memory is measured on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flowrl.core.types import Condition
from flowrl.models.base import encoded_pictures, torch_dtype
from flowrl.models.generic.outline import Outline

TEXT_BATCH = 64  # prompts per forward of the text encoders, as in flowrl.data.prompts.Texts
_LONG = 1000


def decode(adapter: Any, batch: int) -> Any:
    return adapter.decode(torch.empty(batch, *adapter.latent_shape()))


def latents(adapter: Any, batch: int) -> torch.Tensor:
    """Of so many pictures, as the run encodes them."""
    return encoded_pictures(adapter, torch.empty(batch, 3, adapter.height, adapter.width))


def predict(adapter: Any, batch: int, guidance_scale: float) -> torch.Tensor:
    """One guided forward of `batch` samples, as the run makes it."""
    cond = condition(adapter, batch)
    adapter.unconditional = cond.index(torch.zeros(1, dtype=torch.int64))
    x, timestep = torch.empty(batch, *adapter.latent_shape()), torch.full((batch,), 500.0)
    return adapter.predict(x, timestep, cond, guidance_scale)


def condition(adapter: Any, batch: int) -> Condition:
    """Embeddings of `batch` prompts without values."""
    if isinstance(adapter, Outline):
        return adapter.blank_condition(batch)
    dtype = torch_dtype(adapter.config.dtype)
    return Condition({k: torch.empty(batch, *shape, dtype=dtype) for k, shape in adapter.condition_shapes().items()})


def loss(adapter: Any, batch: int, guidance_scale: float, reference: bool) -> torch.Tensor:
    output = predict(adapter, batch, guidance_scale).float()
    if reference:
        with torch.no_grad():
            other = predict(adapter, batch, guidance_scale).float()
        output = output - other
    return output.square().mean()


def encode(name: str, encoder: nn.Module, adapter: Any) -> Any:
    if isinstance(adapter, Outline):
        tokens = adapter.text_tokens[name]
    else:
        # CLIP pads to its table of positions; that of a language model is far longer than any prompt.
        positions = getattr(encoder.config, "max_position_embeddings", None) or _LONG
        tokens = positions if positions < _LONG else adapter.config.max_sequence_length
    ids = torch.zeros(getattr(adapter, "text_batch", TEXT_BATCH), tokens, dtype=torch.int64)
    return encoder(ids, output_hidden_states=True)
