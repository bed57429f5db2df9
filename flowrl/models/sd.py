"""Stable Diffusion 1.x, 2.x, SD-Turbo and LCMs of them (UNet, one CLIP encoder): StableDiffusionPipeline in parts.

Process: VP, predicting eps (1.x, 2.x at 512 px) or v (2.x at 768 px); grids and distilled checkpoints: models/_unet.py.
timestep is that of training, 0..999. `guidance_scale` is the pipeline's own CFG scale (<= 1: none); of a consistency
model the value that is embedded. Text: CLIP, 77 tokens; 2.x has OpenCLIP's with its last layer left out, which is how
its checkpoints are stored. The safety checker is not loaded: it would blacken what the rewards are to see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.types import Condition
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._unet import UNetConfig, UNetImages, takes
from flowrl.models.base import torch_dtype

LEVEL = "tested"
PIPELINE = "StableDiffusionPipeline"
__all__ = ["LEVEL", "PIPELINE", "Config", "Sd", "build", "skeleton", "takes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(UNetConfig):
    """Options of every UNet family."""


class Sd(UNetImages):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser."""

    def __init__(self, pipeline: Any, config: Config) -> None:
        UNetImages.__init__(self, pipeline, config)
        pipeline.safety_checker = None

    def _texts(self, prompts: list[str], negative: list[str] | None) -> tuple[Condition, Condition]:
        embeds, away = self.pipeline.encode_prompt(prompts, self.device, 1, True, negative_prompt=negative)
        return Condition({"prompt_embeds": embeds}), Condition({"prompt_embeds": away})

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings: what `encode` returns, without its first dimension."""
        return {"prompt_embeds": (self._text_tokens, self.network.config.cross_attention_dim)}


def build(config: Config) -> Sd:
    from diffusers import AutoencoderKL, StableDiffusionPipeline

    left_out = {"safety_checker": None, "requires_safety_checker": False}
    return Sd(load_pipeline(StableDiffusionPipeline, AutoencoderKL, config, **left_out), config)


def skeleton(config: Config, folder: Path) -> Sd:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizer and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import StableDiffusionPipeline

    absent = ("feature_extractor", "image_encoder")
    pipeline = meta_pipeline(folder, torch_dtype(config.dtype), kind=StableDiffusionPipeline, absent=absent)
    return Sd(pipeline, config)
