"""Stable Diffusion XL, SDXL-Turbo and LCMs of it (UNet, two CLIP encoders): StableDiffusionXLPipeline in parts.

Process: VP; grids and distilled checkpoints: models/_unet.py. timestep is that of training, 0..999. `guidance_scale` is
the pipeline's own CFG scale (<= 1: none); of a consistency model the value that is embedded. Text: the last but one
layers of CLIP and of OpenCLIP beside each other, OpenCLIP's pooled embedding, and the picture's size. Without a
negative prompt guidance leads away from zeros where the checkpoint says so (force_zeros_for_empty_prompt). The VAE
decodes in float32; its published weights overflow in float16, and so need no fp16-fix here (`model.vae` takes one).
Refiners are refused: they start from another model's latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.models import _unet
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._native import Part
from flowrl.models._unet import UNetConfig, UNetImages
from flowrl.models.base import lacks, torch_dtype

LEVEL = "tested"
PIPELINE = "StableDiffusionXLPipeline"
SIZES = 6  # original height and width, crop's top and left, target height and width


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(UNetConfig):
    """Options of every UNet family."""


class Sdxl(UNetImages):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser."""

    def __init__(self, pipeline: Any, config: Config) -> None:
        for name in ("text_encoder", "text_encoder_2"):
            if getattr(pipeline, name) is None:
                raise ModelError(lacks(type(pipeline).__name__, name) + "; a refiner has one text encoder alone")
        self._pooled = pipeline.text_encoder_2.config.projection_dim
        if not _sized(pipeline.unet.config, self._pooled):
            raise ModelError(
                "model.path: this UNet is told other sizes than the picture's, as a refiner is, which starts from "
                "another model's latents; use the base checkpoint"
            )
        UNetImages.__init__(self, pipeline, config)
        self._time_ids = torch.tensor([[self.height, self.width, 0, 0, self.height, self.width]], dtype=torch.float32)

    def _texts(self, prompts: list[str], negative: list[str] | None) -> tuple[Condition, Condition]:
        embeds, away, pooled, pooled_away = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=True, negative_prompt=negative
        )
        return (
            Condition({"prompt_embeds": embeds, "pooled": pooled}),
            Condition({"prompt_embeds": away, "pooled": pooled_away}),
        )

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings: what `encode` returns, without its first dimension."""
        embeds = (self._text_tokens, self.network.config.cross_attention_dim)
        return {"prompt_embeds": embeds, "pooled": (self._pooled,)}

    def _added(self, cond: Condition) -> dict[str, Tensor]:
        pooled = cond["pooled"]
        return {"text_embeds": pooled, "time_ids": self._time_ids.to(pooled).expand(len(pooled), -1)}


def _sized(unet: Any, pooled: int) -> bool:
    """Whether the network is told the six sizes of a base checkpoint."""
    return unet.get("projection_class_embeddings_input_dim") == SIZES * unet.get("addition_time_embed_dim", 0) + pooled


def takes(part: Part) -> bool:
    """Whether a checkpoint of the class is a base one, for text alone."""
    return _unet.takes(part) and _sized(part("unet"), part("text_encoder_2").get("projection_dim", 512))


def build(config: Config) -> Sdxl:
    from diffusers import AutoencoderKL, StableDiffusionXLPipeline

    return Sdxl(load_pipeline(StableDiffusionXLPipeline, AutoencoderKL, config), config)


def skeleton(config: Config, folder: Path) -> Sdxl:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizers and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import StableDiffusionXLPipeline

    absent = ("feature_extractor", "image_encoder")
    pipeline = meta_pipeline(folder, torch_dtype(config.dtype), kind=StableDiffusionXLPipeline, absent=absent)
    return Sdxl(pipeline, config)
