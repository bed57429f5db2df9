"""Stable Diffusion XL, SDXL-Turbo and LCMs of it (UNet, two CLIP encoders): StableDiffusionXLPipeline in parts.

Process: VP; grids and distilled checkpoints: models/_unet.py. timestep is that of training, 0..999. `guidance_scale` is
the pipeline's own CFG scale (<= 1: none); of a consistency model the value that is embedded. Text: the last but one
layers of CLIP and of OpenCLIP side by side, OpenCLIP's pooled embedding, and the image's size. Without a negative
prompt guidance leads away from zeros if the checkpoint has force_zeros_for_empty_prompt. The VAE has the type of
`model.vae_precision`, by default float32, so its published weights, which overflow in float16, need no fp16-fix.
Refiners are refused: they start from another model's latents.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.tensors import sent
from flowrl.core.types import Condition
from flowrl.models._native import Family, Part
from flowrl.models._unet import Clip, UNet, UNetConfig, on_noise
from flowrl.models.pipelines.paths import lacks

LEVEL = "tested"
SIZES = 6  # inputs of the network about the image's size: UNet.sizes


@dataclass(frozen=True, kw_only=True)
class Config(UNetConfig):
    """Options of every UNet family."""


class TwoClips(Clip):
    """The pipeline's two text encoders side by side, and the image's size."""

    def __init__(self, pipeline: Any) -> None:
        for name in ("text_encoder", "text_encoder_2"):
            if pipeline.components[name] is None:
                raise ModelError(lacks(type(pipeline).__name__, name) + "; a refiner has one text encoder alone")
        self.pipeline = pipeline
        self.tokens = pipeline.text_encoder.config.max_position_embeddings
        self.pooled = width = pipeline.text_encoder_2.config.projection_dim
        if not _sized(pipeline.unet.config, width):
            raise ModelError(
                "model.path: this UNet takes other sizes than the image's, as a refiner does, which starts from "
                "another model's latents; use the base checkpoint"
            )

    def encode(
        self, prompts: list[str], negative: list[str] | None, device: torch.device
    ) -> tuple[Condition, Condition]:
        embeds, away, pooled, pooled_away = self.pipeline.encode_prompt(
            prompts, device=device, do_classifier_free_guidance=True, negative_prompt=negative
        )
        return (
            Condition({"prompt_embeds": embeds, "pooled": pooled}),
            Condition({"prompt_embeds": away, "pooled": pooled_away}),
        )

    def added(self, cond: Condition, sizes: Tensor) -> dict[str, Tensor]:
        pooled = cond["pooled"]
        return {"text_embeds": pooled, "time_ids": sent(sizes, pooled.device).to(pooled).expand(len(pooled), -1)}


def _sized(unet: Any, pooled: int) -> bool:
    """Whether the network takes the six sizes of a base checkpoint."""
    return unet.get("projection_class_embeddings_input_dim") == SIZES * unet.get("addition_time_embed_dim", 0) + pooled


def _base(part: Part) -> bool:
    """Whether a checkpoint is a base one on a plain VP process."""
    return on_noise(part) and _sized(part("unet"), part("text_encoder_2").get("projection_dim", 512))


FAMILY = Family(
    adapter=partial(UNet, texts=TwoClips),
    pipeline="StableDiffusionXLPipeline",
    denoiser="unet",
    channels=(4, 4),
    fits=_base,
)
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
