"""Wan 2.1 and 2.2 from text: WanPipeline called part by part, on latents [B, 16, T, h, w] in float32.

Process: flow, velocity prediction. timestep = 1000 sigma, as the scheduler rounds it. `guidance_scale` is the
pipeline's own CFG scale (<= 1: none): two forwards, so that a rollout holds no clip twice. Text: UMT5, each prompt
padded with zeros. F frames have T = (F - 1) / 4 + 1 latent frames; one frame is a picture and is decoded as one.
Wan 2.2 has two experts, both trained: `transformer` down to the boundary, `transformer_2` below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._experts import Experts
from flowrl.models._loading import load_pipeline, meta_pipeline
from flowrl.models._native import Native, Part
from flowrl.models._schedulers import path_of, schedule_of
from flowrl.models.base import ModelConfig, autocast, guided, require_channels, torch_dtype
from flowrl.models.weights import component_names

# yifan123/flow_grpo:scripts/train_wan2_1.py: self- and cross-attention of every block
LORA_TARGETS = ("to_k", "to_out.0", "to_q", "to_v")

LEVEL = "tested"
PIPELINE = "WanPipeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ModelConfig):
    num_frames: int = 81
    """Of a clip: one more than a multiple of 4. 1 makes pictures."""
    max_sequence_length: int = 512
    """Text tokens per prompt, at most 512."""
    shift: float | None = None
    """Shift of the sigmas; null takes the scheduler's own."""
    guidance_scale_2: float | None = None
    """CFG scale of the second expert (Wan 2.2), wherever there is guidance; null: that of the first."""
    negative_prompt: str = ""
    """What guidance leads away from."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length={self.max_sequence_length} must be in 1..512")
        if self.shift is not None and self.shift <= 0:
            raise ValueError(f"shift={self.shift} must be positive; null takes the scheduler's own")
        if self.guidance_scale_2 is not None and self.guidance_scale_2 < 1:
            raise ValueError(f"guidance_scale_2={self.guidance_scale_2} must be at least 1, which means none")


class Wan(Native):
    """Adapter of the family; `pipeline` holds every part, `network` the denoiser, or both of them."""

    lora_targets = LORA_TARGETS

    def __init__(self, pipeline: Any, config: Config) -> None:
        experts = {"transformer": pipeline.transformer}
        # In units of the timestep: the first expert has those from here on.
        self.boundary = 0.0
        if pipeline.config.boundary_ratio is not None:
            experts["transformer_2"] = pipeline.transformer_2
            self.boundary = pipeline.config.boundary_ratio * pipeline.scheduler.config.num_train_timesteps
        elif config.guidance_scale_2 is not None:
            raise ModelError(f"model.guidance_scale_2={config.guidance_scale_2}: this model has no second expert")
        if any(part is None for part in experts.values()):
            raise ModelError("this Wan model leaves out one of its transformers; give a complete pipeline folder")
        require_channels(pipeline.transformer, pipeline.vae.config.z_dim)
        Native.__init__(self, pipeline, config, Experts(experts) if len(experts) > 1 else None)
        unit = pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[-1]
        self.height, self.width = self._sides(config, (480, 832), unit)
        self.num_frames = config.num_frames
        self._check_frames()

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The denoisers by their names in the pipeline: read off `network`, which a cheaper copy may stand in for."""
        return component_names(self.network)

    def _check_frames(self) -> None:
        """Whole latent frames behind the first."""
        step, frames = self.pipeline.vae_scale_factor_temporal, self.num_frames
        if frames < 1 or (frames - 1) % step:
            near = max(round((frames - 1) / step), 0) * step + 1
            raise ModelError(f"model.num_frames={frames} must be one more than a multiple of {step}; use {near}")

    def dead_lora_modules(self) -> tuple[str, ...]:
        return ()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        if self.unconditional is None:
            self.unconditional = self._encode([self.config.negative_prompt])
        return self._encode(list(prompts))

    def _encode(self, prompts: list[str]) -> Condition:
        self._require_encoders()
        embeds, _ = self.pipeline.encode_prompt(
            prompt=prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.max_sequence_length,
            device=self.device,
        )
        return Condition({"prompt_embeds": embeds})

    def latent_shape(self) -> tuple[int, ...]:
        frames = (self.num_frames - 1) // self.pipeline.vae_scale_factor_temporal + 1
        scale = self.pipeline.vae_scale_factor_spatial
        return (self.pipeline.transformer.config.in_channels, frames, self.height // scale, self.width // scale)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one prompt's embeddings: what `encode` returns, without its first dimension."""
        return {"prompt_embeds": (self.config.max_sequence_length, self.pipeline.transformer.config.text_dim)}

    def schedule(self, num_inference_steps: int) -> Schedule:
        """The scheduler's grid; its multistep solver (UniPC) is not used."""
        scheduler = self._scheduler()
        path = path_of(scheduler)
        if not path.is_flow:
            kind = type(scheduler)
            raise ModelError(f"{kind.__name__} is set up for a noise process, Wan is a flow: set use_flow_sigmas")
        scheduler.set_timesteps(num_inference_steps)
        return schedule_of(path, scheduler, scheduler.timesteps, scheduler.sigmas)

    def _scheduler(self) -> Any:
        """A fresh one of the pipeline's, with the configured shift."""
        kind, values, shift = type(self.pipeline.scheduler), self.pipeline.scheduler.config, {}
        if self.config.shift is not None:
            shift = {"flow_shift" if "flow_shift" in values else "shift": self.config.shift}
        return kind.from_config(values, **shift)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale) | {"num_frames": self.num_frames}
        if guidance_scale > 1:
            call["negative_prompt"] = self.config.negative_prompt
            if self.config.guidance_scale_2 is not None:
                call["guidance_scale_2"] = self.config.guidance_scale_2
        self.pipeline.scheduler = self._scheduler()
        return call

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """Samples of both experts in one batch make two forwards, one each."""
        # Fake tensors have no values: in the plan of a run the first expert stands for both.
        if len(self.experts) == 1 or isinstance(timestep, FakeTensor):
            return self._guided(True, x, timestep, cond, guidance_scale)
        first = timestep >= self.boundary
        if bool(first.all()) or not bool(first.any()):
            return self._guided(bool(first.all()), x, timestep, cond, guidance_scale)
        output = [
            self._guided(own, x[rows], timestep[rows], cond.index(rows), guidance_scale)
            for own, rows in ((True, first.nonzero().squeeze(1)), (False, (~first).nonzero().squeeze(1)))
        ]
        order = torch.cat([first.nonzero(), (~first).nonzero()]).squeeze(1).argsort()
        return torch.cat(output)[order]

    def _guided(self, first: bool, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        expert = self.experts["transformer" if first else "transformer_2"]

        def forward(x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
            if self.pipeline.config.expand_timesteps:
                # Wan 2.2 5B takes one per token, all alike where there is no first frame to keep.
                patch = expert.config.patch_size
                tokens = (x.shape[2] // patch[0]) * (x.shape[3] // patch[1]) * (x.shape[4] // patch[2])
                timestep = timestep[:, None].expand(-1, tokens)
            with autocast(self.device, self._dtype):
                return expert(
                    hidden_states=x.to(self._dtype),
                    timestep=timestep,
                    encoder_hidden_states=cond["prompt_embeds"],
                    return_dict=False,
                )[0]

        scale = guidance_scale
        if not first and self.config.guidance_scale_2 is not None and guidance_scale > 1:
            scale = self.config.guidance_scale_2
        return guided(forward, x, timestep, cond, self.unconditional, scale, separate=True)

    def batch_key(self, step_index: int) -> int:
        return 0 if len(self.experts) == 1 else step_index

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos [B, F, 3, H, W]; pictures [B, 3, H, W] where num_frames is 1."""
        vae = self.pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
        frames = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0].transpose(1, 2)
        frames = (frames.float() / 2 + 0.5).clamp(0, 1)
        return frames[:, 0] if self.num_frames == 1 else frames


def takes(part: Part) -> bool:
    """Whether a checkpoint of the class is one for text alone; any scheduler of a flow gives the grid."""
    return part("transformer").get("in_channels", 16) == part("vae").get("z_dim", 16)


def build(config: Config) -> Wan:
    from diffusers import AutoencoderKLWan, WanPipeline

    return Wan(load_pipeline(WanPipeline, AutoencoderKLWan, config), config)


def skeleton(config: Config, folder: Path) -> Wan:
    """The adapter on the meta device, from a pipeline folder's JSON files alone: shapes, schedule, counts.

    It has no tokenizer and no weights; `config.path` and `config.vae` are not read.
    """
    from diffusers import WanPipeline

    return Wan(meta_pipeline(folder, torch_dtype(config.dtype), kind=WanPipeline), config)
