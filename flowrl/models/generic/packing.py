"""Latents of given images: the pipeline's own way from latents to its VAE, read by probes and undone.

Every class reorders and scales its latents before `vae.decode`. Probes through that code, with a listener in the VAE's
place, show of each value its latent, a factor and an offset; a random sample shows whether that is all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.models._vae import encoded_pixels
from flowrl.models.base import VaePrecision, require_image_size
from flowrl.models.generic.reentry import replaced
from flowrl.models.generic.stand_ins import Answer, Encoded

_STEP = 1024
"""Height of a probe, beside which the rounding of an offset is small, and base of the two digits of a place."""


class _Listener(Encoded):
    """A VAE that keeps the latents it is to decode, and decodes them to given images [1, 3, H, W] in [0, 1]."""

    dtype = torch.float32  # so that probes are not rounded

    def __init__(self, vae: Any, images: Tensor) -> None:
        super().__init__(vae)
        self.images, self.heard = images, images

    def decode(self, latents: Tensor, *_: Any, **__: Any) -> Answer:
        self.heard, values = latents.float(), 2 * self.images - 1
        return Answer(sample=values[:, :, None] if latents.ndim == 5 else values)


@dataclass(frozen=True)
class Packing:
    """Where the VAE's values lie in a pipeline's latents: value = scale * latent + offset."""

    order: Tensor
    """Place of each latent's value among the VAE's, [n] int64."""
    scale: Tensor
    """Shaped like the latents of a sample, as the offset is."""
    offset: Tensor
    shape: tuple[int, ...]
    """Of the VAE's latents, [C, h, w] or [C, 1, h, w]."""
    size: tuple[int, int]  # height and width of the images
    apart: Tensor | float = 0.0
    """Largest difference of a random sample after packing and decoding, and of a given image in its place."""

    def ordered(self, values: Tensor) -> Tensor:
        """The VAE's values [B, *shape] in the order of the latents [B, ...]; RuntimeError for another shape."""
        values = values.reshape(len(values), *self.shape).flatten(1)
        return values.index_select(1, self.order).unflatten(1, self.scale.shape)

    def checked(self, kind: str) -> Self:
        """Itself. Raises ModelError, with the class's name `kind`: it does not undo the way to the VAE."""
        if self.apart <= 1e-3:  # and not NaN
            return self
        raise ModelError(
            f"{kind} cannot be used for given images: its way from latents to its VAE is more than an order and a "
            f"scale (a random sample comes back with a difference of {float(self.apart):.1e})"
        )

    def encode(self, vae: Any, images: Tensor, precision: VaePrecision, noise: Tensor | None) -> Tensor:
        """As `ModelAdapter.encode_images`."""
        require_image_size(images, *self.size)
        images = images.to(self.order.device)
        if vae.config.get("in_channels") == 4:  # and opaque
            images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)
        images = images[:, :, None] if len(self.shape) == 4 else images
        return (encoded_pixels(vae, images, precision, noise, self.ordered) - self.offset) / self.scale


def read(pipeline: Any, decode: Callable[[Tensor], Tensor], zero: Tensor, size: tuple[int, int]) -> Packing:
    """The packing of a pipeline, not checked yet.

    `decode`: latents [1, ...] float32 -> image [1, 3, H, W] in [0, 1], by the pipeline's own code; `zero`: zeros like
    the latents of a sample, [1, ...]; `size`: (H, W).
    """
    drawn = torch.Generator().manual_seed(0)
    listener = _Listener(pipeline.vae, torch.rand(1, 3, *size, generator=drawn).to(zero.device))

    def heard(latents: Tensor) -> tuple[Tensor, Tensor]:
        with replaced(pipeline, {"vae": listener}):
            shown = decode(latents.view_as(zero))
        return listener.heard, (shown - listener.images).abs().max()

    offset, _ = heard(zero)
    scale = (heard(zero + _STEP)[0] - offset) / _STEP
    places = torch.arange(zero.numel(), device=zero.device)
    low, high = (((heard(n.float())[0] - offset) / scale).round() for n in (places % _STEP, places // _STEP))
    order = (low + _STEP * high).flatten().argsort()
    scale, offset = (each.flatten()[order].view(zero.shape[1:]) for each in (scale, offset))
    packing = Packing(order, scale, offset, tuple(low.shape[1:]), size)
    values = torch.randn(low.shape, generator=drawn).to(zero.device)
    again, shown = heard((packing.ordered(values) - offset) / scale)
    return Packing(order, scale, offset, packing.shape, size, torch.maximum((again - values).abs().max(), shown))
