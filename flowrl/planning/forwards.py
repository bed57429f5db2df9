"""The forwards of a run on meaningless inputs, on which its memory is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.models.base import ModelAdapter, image_shape


class _Copies(TorchDispatchMode):
    """A convolution's copy of its input: cuDNN works on channels last (as measured, docs/performance.md).

    To a meter around it that is a storage like others.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is not torch.ops.aten.convolution or all(size == 1 for size in args[1].shape[2:]):
            return func(*args, **(kwargs or {}))
        copy = torch.empty_like(args[0])
        result = func(*args, **(kwargs or {}))
        del copy
        return result


def decode(adapter: ModelAdapter, batch: int) -> Any:
    with _Copies():
        return adapter.decode(torch.empty(batch, *adapter.latent_shape()))


def slope(adapter: ModelAdapter, count: int) -> None:
    """`count` images and the gradient of a value of each pixel at their latents."""
    x = torch.empty(count, *adapter.latent_shape(), requires_grad=True)
    with _Copies():
        torch.autograd.grad(adapter.decode_with_grad(x).float().sum(), x)


def latents(adapter: ModelAdapter, batch: int) -> torch.Tensor:
    """Latents of `batch` images or videos, as the run encodes them."""
    return adapter.encode_images(torch.empty(batch, *image_shape(adapter)))


def predict(adapter: ModelAdapter, batch: int, guidance_scale: float) -> torch.Tensor:
    """One guided forward of `batch` samples, as the run makes it."""
    cond = adapter.blank_condition(batch)
    adapter.unconditional = cond.index(torch.zeros(1, dtype=torch.int64))
    x, timestep = torch.empty(batch, *adapter.latent_shape()), torch.full((batch,), 500.0)
    return adapter.predict(x, timestep, cond, guidance_scale)


def loss(adapter: ModelAdapter, batch: int, guidance_scale: float, reference: bool) -> torch.Tensor:
    output = predict(adapter, batch, guidance_scale).float()
    if reference:
        with torch.no_grad():
            other = predict(adapter, batch, guidance_scale).float()
        output = output - other
    return output.square().mean()


def microbatch(
    adapter: ModelAdapter, trained: Iterable[nn.Parameter], batch: int, guidance_scale: float, reference: bool
) -> None:
    """A forward and backward of an update, beside the gradients that an earlier one has left."""
    for p in trained:
        p.grad = torch.empty_like(p)
    loss(adapter, batch, guidance_scale, reference).backward()


def encode(name: str, encoder: nn.Module, adapter: ModelAdapter) -> Any:
    ids = torch.zeros(adapter.text_batch, adapter.encoder_tokens(name, encoder), dtype=torch.int64)
    return encoder(ids, output_hidden_states=True)
