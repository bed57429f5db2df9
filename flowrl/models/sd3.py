"""Stable Diffusion 3 and 3.5 (MMDiT): StableDiffusion3Pipeline called part by part.

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is the pipeline's own CFG
scale (<= 1: none). Text: two CLIP encoders and T5; without T5 the pipeline pads with zero tokens, and
so does this adapter, since it calls the pipeline's own `encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._native import NativeImages, Part, on_euler
from flowrl.models.base import ModelConfig, autocast, guided, torch_dtype

# yifan123/flow_grpo:scripts/train_sd3.py
LORA_TARGETS = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)

LEVEL = "tested"
PIPELINE = "StableDiffusion3Pipeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ModelConfig):
    max_sequence_length: int = 256
    """T5 tokens per prompt; SD3 has no text mask, so the padding is part of the input."""
    load_t5: bool = True
    """False replaces T5 by zero tokens, as SD3 allows: 9 GB less in bf16."""


class Sd3(NativeImages):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser."""

    lora_targets = LORA_TARGETS

    def __init__(self, pipeline: Any, config: Config) -> None:
        NativeImages.__init__(self, pipeline, config)
        default = pipeline.default_sample_size * pipeline.vae_scale_factor
        # Whole patches, and no longer than the table of position embeddings.
        unit = pipeline.vae_scale_factor * pipeline.patch_size
        largest = self.network.config.pos_embed_max_size * unit
        self.height, self.width = self._sides(config, (default, default), unit, largest)

    def dead_lora_modules(self) -> tuple[str, ...]:
        # The last block drops its text tokens, so their queries reach nothing.
        last = len(self.network.transformer_blocks) - 1
        return (f"transformer_blocks.{last}.attn.add_q_proj",)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        if self.unconditional is None:
            self.unconditional = self._encode([""])
        return self._encode(list(prompts))

    def _encode(self, prompts: list[str]) -> Condition:
        self._require_encoders()
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
        )
        return Condition({"prompt_embeds": embeds, "pooled": pooled})

    def latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor
        return (self.network.config.in_channels, self.height // scale, self.width // scale)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings: what `encode` returns, without its first dimension."""
        sizes, clip_tokens = self.network.config, self.pipeline.tokenizer_max_length
        tokens = clip_tokens + self.config.max_sequence_length
        return {"prompt_embeds": (tokens, sizes.joint_attention_dim), "pooled": (sizes.pooled_projection_dim,)}

    def schedule(self, num_inference_steps: int) -> Schedule:
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        if not isinstance(self.pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
            kind = type(self.pipeline.scheduler).__name__
            raise ModelError(
                f"{kind} is not the family's FlowMatchEulerDiscreteScheduler; load the pipeline with that one, or use "
                "model.name=generic"
            )
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipeline.scheduler.config)
        options = {}
        if scheduler.config.get("use_dynamic_shifting"):
            scale, patch, values = self.pipeline.vae_scale_factor, self.pipeline.patch_size, scheduler.config
            tokens = (self.height // scale // patch) * (self.width // scale // patch)
            options["mu"] = calculate_shift(
                tokens,
                values.get("base_image_seq_len", 256),
                values.get("max_image_seq_len", 4096),
                values.get("base_shift", 0.5),
                values.get("max_shift", 1.16),
            )
        scheduler.set_timesteps(num_inference_steps, **options)
        return Schedule(sigmas=scheduler.sigmas.float().cpu(), timesteps=scheduler.timesteps.float().cpu())

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        return guided(self._forward, x, timestep, cond, self.unconditional, guidance_scale)

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        with autocast(self.device, self._dtype):
            return self.network(
                hidden_states=x.to(self._dtype),
                timestep=timestep,
                encoder_hidden_states=cond["prompt_embeds"],
                pooled_projections=cond["pooled"],
                return_dict=False,
            )[0]


def takes(part: Part) -> bool:
    """Whether a checkpoint of the class is one for text alone, on the family's grid."""
    return on_euler(part) and part("transformer").get("in_channels", 16) == part("vae").get("latent_channels", 4)


def build(config: Config) -> Sd3:
    from diffusers import AutoencoderKL, StableDiffusion3Pipeline

    left_out: dict[str, Any] = {} if config.load_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    return Sd3(load_pipeline(StableDiffusion3Pipeline, AutoencoderKL, config, **left_out), config)


def skeleton(config: Config, folder: Path) -> Sd3:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizers and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import StableDiffusion3Pipeline

    absent = () if config.load_t5 else ("text_encoder_3",)
    pipeline = meta_pipeline(folder, torch_dtype(config.dtype), kind=StableDiffusion3Pipeline, absent=absent)
    pipeline.tokenizer_max_length = pipeline.text_encoder.config.max_position_embeddings
    return Sd3(pipeline, config)
