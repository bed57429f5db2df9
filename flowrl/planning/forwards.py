"""The forwards of a run on meaningless inputs, on which its memory is measured."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.models.base import ModelAdapter, image_shape
from flowrl.reward import Card


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


def slope(adapter: ModelAdapter, count: int, networks: Sequence[nn.Module] = ()) -> None:
    """`count` images or videos, and the gradient at their latents of what these networks see; without any, of pixels.

    A network is the image tower of open_clip, on squares of its size of an image, or of 8 frames of a video.
    """
    x = torch.empty(count, *adapter.latent_shape(), requires_grad=True)
    with _Copies():
        images = adapter.decode_with_grad(x)
        total = images.sum()
        for network in networks:
            frames = (images[:, :8] if images.ndim == 5 else images).flatten(0, -4)
            size: Any = network.image_size
            seen = F.interpolate(frames, size, mode="bicubic", antialias=True)
            total = total + network(seen.to(next(network.parameters()).dtype)).float().sum()
        torch.autograd.grad(total, x)


def image_networks(cards: Iterable[Card]) -> dict[str, nn.Module]:
    """Output -> image tower, on the meta device, of each card that names one; in the card's precision."""
    found: dict[str, nn.Module] = {}
    for card in cards:
        import open_clip

        described = open_clip.get_model_config(card.image_network)
        if described is not None:
            with torch.device("meta"):
                network = open_clip.CLIP(**described).visual
            dtype = torch.bfloat16 if card.half_precision else torch.float32
            found[card.outputs[0]] = network.to(dtype).eval().requires_grad_(False)
    return found


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
