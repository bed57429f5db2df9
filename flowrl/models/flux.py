"""FLUX.1: FluxPipeline called part by part, on packed latents [B, tokens, 64].

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is the value that distilled checkpoints
embed (FLUX.1-dev: 3.5) and costs no second forward; a checkpoint without that input (schnell) does not see it, as in
the pipeline. True CFG is a second thing, `model.true_cfg_scale`, the same in rollout, training and evaluation. Text:
pooled CLIP, and T5 without a mask, so its padding is part of the input. In bfloat16 the network rounds its timestep to
8 bits, here as in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._native import NativeImages, Part, on_euler
from flowrl.models._packed import grid_schedule, statically_shifted, token_grid
from flowrl.models.base import (
    ModelConfig,
    autocast,
    guided,
    require_channels,
    torch_dtype,
)

# yifan123/flow_grpo:scripts/train_flux.py. The attention names are those of the single-stream blocks too.
LORA_TARGETS = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)

LEVEL = "tested"
PIPELINE = "FluxPipeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ModelConfig):
    max_sequence_length: int = 512
    """T5 tokens per prompt, at most 512."""
    shift: float | None = None
    """Static shift of the sigmas in place of the scheduler's own; null: what the pipeline does with this picture size.
    DanceGRPO and MixGRPO publish 3."""
    true_cfg_scale: float = 1.0
    """Classifier-free guidance beside the embedded value; 1: none."""
    negative_prompt: str = ""
    """What true CFG guides away from."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length={self.max_sequence_length} must be in 1..512")
        if self.shift is not None and self.shift <= 0:
            raise ValueError(f"shift={self.shift} must be positive; null takes the pipeline's own")
        if self.true_cfg_scale < 1:
            raise ValueError(f"true_cfg_scale={self.true_cfg_scale} must be at least 1, which means none")


class Flux(NativeImages):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser."""

    lora_targets = LORA_TARGETS
    channel_axis = 2

    def __init__(self, pipeline: Any, config: Config) -> None:
        NativeImages.__init__(self, pipeline, config)
        require_channels(pipeline.transformer, 4 * pipeline.vae.config.latent_channels)
        default = pipeline.default_sample_size * pipeline.vae_scale_factor
        self.height, self.width = self._sides(config, (default, default), 2 * pipeline.vae_scale_factor)

    def dead_lora_modules(self) -> tuple[str, ...]:
        return ()  # the single-stream blocks read all that the last double-stream block writes

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        if self.unconditional is None and self.config.true_cfg_scale > 1:
            self.unconditional = self._encode([self.config.negative_prompt])
        return self._encode(list(prompts))

    def _encode(self, prompts: list[str]) -> Condition:
        self._require_encoders()
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        return Condition({"prompt_embeds": embeds, "pooled": pooled})

    def grid(self) -> tuple[int, int]:
        """(rows, columns) of tokens."""
        return token_grid(self.height, self.width, self.pipeline.vae_scale_factor)

    def latent_shape(self) -> tuple[int, ...]:
        rows, columns = self.grid()
        return (rows * columns, self.network.config.in_channels)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings: what `encode` returns, without its first dimension."""
        sizes = self.network.config
        embeds = (self.config.max_sequence_length, sizes.joint_attention_dim)
        return {"prompt_embeds": embeds, "pooled": (sizes.pooled_projection_dim,)}

    def schedule(self, num_inference_steps: int) -> Schedule:
        tokens, _ = self.latent_shape()
        return grid_schedule(self.pipeline.scheduler, num_inference_steps, tokens, self.config.shift)

    def branches(self, guidance_scale: float) -> int:
        """Forwards per sample: the embedded value needs no second one."""
        return 1 + (self.config.true_cfg_scale > 1)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale)
        if self.config.true_cfg_scale > 1:
            call |= {"true_cfg_scale": self.config.true_cfg_scale, "negative_prompt": self.config.negative_prompt}
        if self.config.shift is not None:
            self.pipeline.scheduler = statically_shifted(self.pipeline.scheduler, self.config.shift)
        return call

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        def forward(x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
            return self._forward(x, timestep, cond, guidance_scale)

        return guided(forward, x, timestep, cond, self.unconditional, self.config.true_cfg_scale)

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        embeds = cond["prompt_embeds"]
        guidance = None
        if self.network.config.guidance_embeds:
            guidance = torch.full((len(x),), guidance_scale, device=x.device)
        with autocast(self.device, self._dtype):
            return self.network(
                hidden_states=x.to(self._dtype),
                timestep=timestep / 1000,
                guidance=guidance,
                pooled_projections=cond["pooled"],
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=x.device),
                img_ids=self.pipeline._prepare_latent_image_ids(len(x), *self.grid(), x.device, torch.float32),
                return_dict=False,
            )[0]

    def _packed(self, latents: Tensor) -> Tensor:
        return self.pipeline._pack_latents(latents, *latents.shape)

    def _unpacked(self, latents: Tensor) -> Tensor:
        return self.pipeline._unpack_latents(latents, self.height, self.width, self.pipeline.vae_scale_factor)


def takes(part: Part) -> bool:
    """Whether a checkpoint of the class is one for text alone, on the family's grid."""
    packed = 4 * part("vae").get("latent_channels", 4)
    return on_euler(part) and part("transformer").get("in_channels", 64) == packed


def build(config: Config) -> Flux:
    from diffusers import AutoencoderKL, FluxPipeline

    return Flux(load_pipeline(FluxPipeline, AutoencoderKL, config), config)


def skeleton(config: Config, folder: Path) -> Flux:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizers and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import FluxPipeline

    return Flux(meta_pipeline(folder, torch_dtype(config.dtype), kind=FluxPipeline), config)
