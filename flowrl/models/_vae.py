"""The VAE at work, the same for every adapter: its type (`model.vae_precision`), its switches, its arithmetic.

On CUDA torch computes the convolutions of a float32 network in TF32: operands rounded to 10 bits of mantissa, sums in
float32. That is `tf32`; `float32` is IEEE arithmetic. On a CPU both are IEEE.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.models.base import ModelConfig, VaePrecision
from flowrl.models.memory.units import recompute_units


def vae_dtype(precision: VaePrecision) -> torch.dtype:
    """The type of the VAE's weights and of its latents."""
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return half.get(precision, torch.float32)


def cast_vae(pipeline: Any, precision: VaePrecision) -> None:
    """Give the VAE of a loaded pipeline its type, whatever the type of the denoiser."""
    vae = pipeline.components.get("vae")
    if isinstance(vae, nn.Module):
        # Past ModelMixin.to, which warns of half precision on a CPU.
        nn.Module.to(vae, vae_dtype(precision))


def set_up_vae(pipeline: Any, config: ModelConfig) -> None:
    """Set the VAE's slicing, tiling and memory format.

    Raises ModelError: it lacks the switch, is a VAE for videos, or overflows in the configured type.
    """
    vae, memory = pipeline.components.get("vae"), config.memory
    for option, wanted, switch in (
        ("vae_slicing", memory.vae_slicing, "enable_slicing"),
        ("vae_tiling", memory.vae_tiling, "enable_tiling"),
        ("vae_checkpointing", memory.vae_checkpointing, "enable_gradient_checkpointing"),
    ):
        if wanted:
            try:
                if option != "vae_checkpointing" or not recompute_units(vae.decoder):
                    getattr(vae, switch)()
            except (AttributeError, NotImplementedError, ValueError):
                raise ModelError(
                    f"model.memory.{option}=true: {type(vae).__name__} has no {switch}()",
                    {f"model.memory.{option}": False},
                ) from None
    if memory.vae_channels_last:
        if vae is None or any(p.ndim > 4 for p in vae.parameters()):
            raise ModelError(
                f"model.memory.vae_channels_last=true: {type(vae).__name__} has convolutions over time, and this "
                "format is for those of images",
                {"model.memory.vae_channels_last": False},
            )
        vae.to(memory_format=torch.channels_last)
    # Only the pipelines of SDXL's VAE have upcast_vae(); force_upcast alone is the default of every VAE.
    overflows = vae is not None and "upcast_vae" in dir(pipeline) and vae.config.get("force_upcast", True)
    if config.vae_precision == "float16" and overflows:
        raise ModelError(
            "model.vae_precision=float16: the activations of this VAE exceed float16 (its force_upcast is true), and "
            "images would be black; those of madebyollin/sdxl-vae-fp16-fix do not",
            [{"model.vae_precision": "bfloat16"}, {"model.vae_precision": "tf32"}],
        )


@contextmanager
def arithmetic(precision: VaePrecision) -> Generator[None]:
    """The configured arithmetic of convolutions on CUDA inside the block; the setting is that of the process.

    cuDNN does not try its kernels (`torch.backends.cudnn.benchmark`): torch would give them all memory of the card.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    if vae_dtype(precision) == torch.float32:
        cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


def decoded_pixels(vae: Any, latents: Tensor, precision: VaePrecision) -> Tensor:
    """Images [B, 3, H, W], or frames [B, 3, F, H, W], float32 in [0, 1], of the VAE's own latents.

    Values that overflow are NaN, not white.
    """
    with arithmetic(precision):
        values = vae.decode(latents.to(vae.dtype), return_dict=False)[0].float()
    if vae.dtype == torch.float16:
        values = values + 0 * values
    return (values / 2 + 0.5).clamp(0, 1).contiguous()


def encoded_pixels(
    vae: Any,
    images: Tensor,
    precision: VaePrecision,
    noise: Tensor | None,
    layout: Callable[[Tensor], Tensor] = lambda latents: latents,
) -> Tensor:
    """The VAE's own latents, float32 in a layout, of images [B, 3, H, W], or [B, 3, F, H, W], in [0, 1] on its device.

    `noise` as in `ModelAdapter.encode_images`, in that layout.
    """
    with arithmetic(precision):
        given = vae.encode((2 * images - 1).to(vae.dtype))
    law = given.get("latent_dist")  # that of Sana has no posterior
    latents = layout((given[0] if law is None else law.mean).float())
    if noise is None or law is None:
        return latents
    if noise.shape != latents.shape:
        raise ValueError(f"noise {tuple(noise.shape)} must be shaped like the latents {tuple(latents.shape)}")
    return latents + layout(law.std.float()) * noise.to(latents.device)
