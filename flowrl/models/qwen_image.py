"""Qwen-Image: QwenImagePipeline called part by part, on packed latents [B, tokens, 64].

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is the pipeline's true_cfg_scale (<= 1:
none): two forwards, and the guided prediction is given the length of the conditional one, token by token. Text: the
hidden states of a vision-language model, as long as each prompt; a batch is padded with zeros under a mask, so a
prompt does not see its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._native import Native, Part, on_euler
from flowrl.models._packed import grid_schedule, statically_shifted, token_grid
from flowrl.models.base import (
    ModelConfig,
    autocast,
    classifier_free,
    guided,
    require_channels,
    torch_dtype,
)

# yifan123/flow_grpo:scripts/train_qwenimage.py
LORA_TARGETS = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)

LEVEL = "tested"
PIPELINE = "QwenImagePipeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ModelConfig):
    max_sequence_length: int = 512
    """Tokens per prompt, at most 1024."""
    shift: float | None = None
    """Static shift of the sigmas in place of the scheduler's own; null: what the pipeline does with this picture size.
    DanceGRPO publishes 3."""
    negative_prompt: str = ""
    """What guidance leads away from."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not 1 <= self.max_sequence_length <= 1024:
            raise ValueError(f"max_sequence_length={self.max_sequence_length} must be in 1..1024")
        if self.shift is not None and self.shift <= 0:
            raise ValueError(f"shift={self.shift} must be positive; null takes the pipeline's own")


def renormalised(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """u + s (c - u) with the length of c, token by token; all [B, tokens, C], the result float32."""
    negative, positive = negative.float(), positive.float()
    combined = classifier_free(negative, positive, guidance_scale)
    return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


class QwenImage(Native):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser."""

    lora_targets = LORA_TARGETS
    channel_axis = 2
    # The text encoder makes, and throws away, logits over 152,064 words for every token: 0.16 GB a prompt in bfloat16.
    text_batch = 8

    def __init__(self, pipeline: Any, config: Config) -> None:
        Native.__init__(self, pipeline, config)
        require_channels(pipeline.transformer, 4 * pipeline.vae.config.z_dim)
        default = pipeline.default_sample_size * pipeline.vae_scale_factor
        self.height, self.width = self._sides(config, (default, default), 2 * pipeline.vae_scale_factor)

    def dead_lora_modules(self) -> tuple[str, ...]:
        # The text tokens are dropped behind the last block: what it makes of them reaches nothing.
        last = len(self.network.transformer_blocks) - 1
        unused = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        return tuple(f"transformer_blocks.{last}.{name}" for name in unused)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        if self.unconditional is None:
            self.unconditional = self._encode([self.config.negative_prompt])
        starts = range(0, len(prompts), self.text_batch)
        return Condition.collate([self._encode(list(prompts[k : k + self.text_batch])) for k in starts])

    def _encode(self, prompts: list[str]) -> Condition:
        self._require_encoders()
        # No longer than the pipeline's own call would keep; the mask is None where nothing is padded.
        embeds, mask = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(dim=1).tolist()
        return Condition({"prompt_embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)]})

    def grid(self) -> tuple[int, int]:
        """(rows, columns) of tokens."""
        return token_grid(self.height, self.width, self.pipeline.vae_scale_factor)

    def latent_shape(self) -> tuple[int, ...]:
        rows, columns = self.grid()
        return (rows * columns, self.network.config.in_channels)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings at most: as long as max_sequence_length."""
        return {"prompt_embeds": (self.config.max_sequence_length, self.network.config.joint_attention_dim)}

    def schedule(self, num_inference_steps: int) -> Schedule:
        tokens, _ = self.latent_shape()
        return grid_schedule(self.pipeline.scheduler, num_inference_steps, tokens, self.config.shift)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale)
        call["true_cfg_scale"] = call.pop("guidance_scale")
        if guidance_scale > 1:
            call["negative_prompt"] = self.config.negative_prompt
        if self.config.shift is not None:
            self.pipeline.scheduler = statically_shifted(self.pipeline.scheduler, self.config.shift)
        return call

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        # Two forwards: on one doubled batch the negative prompt would be padded to the longest of the others.
        return guided(
            self._forward,
            x,
            timestep,
            cond,
            self.unconditional,
            guidance_scale,
            combine=renormalised,
            separate=True,
        )

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        rows = list(cond["prompt_embeds"])
        lengths = torch.tensor([len(row) for row in rows], device=x.device)
        longest, mask = max(map(len, rows)), None
        if any(len(row) < longest for row in rows):
            mask = torch.arange(longest, device=x.device) < lengths[:, None]
        with autocast(self.device, self._dtype):
            return self.network(
                hidden_states=x.to(self._dtype),
                timestep=timestep / 1000,
                encoder_hidden_states=nn.utils.rnn.pad_sequence(rows, batch_first=True),
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, *self.grid())]] * len(x),
                return_dict=False,
            )[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = self.pipeline._unpack_latents(latents, self.height, self.width, self.pipeline.vae_scale_factor)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
        # Its VAE is one for videos: a picture is a clip of one frame.
        images = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0][:, :, 0]
        return (images.float() / 2 + 0.5).clamp(0, 1)


def takes(part: Part) -> bool:
    """Whether a checkpoint of the class is one for text alone, on the family's grid."""
    packed = 4 * part("vae").get("z_dim", 16)
    return on_euler(part) and part("transformer").get("in_channels", 64) == packed


def build(config: Config) -> QwenImage:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

    return QwenImage(load_pipeline(QwenImagePipeline, AutoencoderKLQwenImage, config), config)


def skeleton(config: Config, folder: Path) -> QwenImage:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizer and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import QwenImagePipeline

    return QwenImage(meta_pipeline(folder, torch_dtype(config.dtype), kind=QwenImagePipeline), config)
