"""Which family a denoiser or a pipeline belongs to."""

from __future__ import annotations

from typing import Any

from flowrl.models.lora_formats import flux, qwen_image, sd3, unet, wan
from flowrl.models.lora_formats.places import Family

BY_PIPELINE = {
    "StableDiffusionPipeline": unet.FAMILY,
    "StableDiffusionXLPipeline": unet.FAMILY_XL,
    "StableDiffusion3Pipeline": sd3.FAMILY,
    "FluxPipeline": flux.FAMILY,
    "QwenImagePipeline": qwen_image.FAMILY,
    "WanPipeline": wan.FAMILY,
}


def family_of(network: Any) -> Family | None:
    """The family of a denoiser; None for one without a table."""
    kind = type(network).__name__
    if kind == unet.FAMILY.network:
        xl = network.config.addition_embed_type == "text_time"
        return unet.FAMILY_XL if xl else unet.FAMILY
    return next((family for family in BY_PIPELINE.values() if family.network == kind), None)
