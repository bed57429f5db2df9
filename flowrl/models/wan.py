"""Wan 2.1 and 2.2 from text: WanPipeline called part by part, on latents [B, 16, T, h, w] in float32.

Process: flow, velocity prediction. timestep = 1000 sigma, as the scheduler rounds it. `guidance_scale` is the
pipeline's own CFG scale (<= 1: none): two forwards, so that a rollout holds no video twice. Text: UMT5, each prompt
padded with zeros. F frames have T = (F - 1) / 4 + 1 latent frames; one frame is decoded as an image.
Wan 2.2 has two experts: `transformer` down to the boundary, `transformer_2` below it. The steps or times that a method
trains decide which of them trains; `flowrl plan` shows whose they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name

from flowrl.core.errors import ModelError
from flowrl.core.tensors import sent
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.media.media import FPS
from flowrl.media.mp4 import require_rate
from flowrl.models._guidance import guided
from flowrl.models._native import Family, FlowConfig, Native, decoded_frames, encoded_frames
from flowrl.models._schedulers import path_of, schedule_of
from flowrl.models.base import autocast, require_image_size
from flowrl.models.weights.roles import component_names

# yifan123/flow_grpo:scripts/train_wan2_1.py: self- and cross-attention of every block
LORA_TARGETS = ("to_k", "to_out.0", "to_q", "to_v")

LEVEL = "tested"


def near_frames(frames: int, step: int, patch: int) -> int:
    """The nearest number of frames whose latent frames, one and one more every `step` frames, fill whole patches.

    >>> near_frames(5, 2, 5), near_frames(80, 4, 1)
    (9, 81)
    """
    return (max(round(((frames - 1) / step + 1) / patch), 1) * patch - 1) * step + 1


def needed_anywhere(needed: list[bool], network: nn.Module) -> list[bool]:
    """What some process needs of those that share the weights of a network and call it together; else `needed`."""
    mesh: Any = next((getattr(p, "device_mesh", None) for p in network.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None:
        return needed
    flags = torch.tensor(needed, dtype=torch.int32, device=mesh.device_type)
    torch.distributed.all_reduce(flags, group=mesh.get_group())
    return [count > 0 for count in flags.tolist()]


@dataclass(frozen=True, kw_only=True)
class Config(FlowConfig):
    num_frames: int = 81
    """Frames of a video: one more than a multiple of 4. 1 makes images."""
    fps: float = FPS
    """Frames a second of the videos that are saved and shown. 16 is Wan 2.1's and 2.2-A14B's, 24 that of TI2V-5B."""
    guidance_scale_2: float | None = None
    """CFG scale of the second expert (Wan 2.2), wherever there is guidance; null: that of the first."""
    negative_prompt: str = ""
    """Prompt that guidance leads away from."""

    @property
    def frames(self) -> int:
        return self.num_frames

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rate(self.fps, "model.fps")
        if self.num_frames < 1:
            raise ValueError(f"num_frames={self.num_frames} must be at least 1; 1 makes images")
        if self.guidance_scale_2 is not None and self.guidance_scale_2 < 1:
            raise ValueError(f"guidance_scale_2={self.guidance_scale_2} must be at least 1, which means none")


class Wan(Native):
    """`network` is the denoiser, or both of them."""

    lora_targets = LORA_TARGETS
    text_width = "text_dim"
    encoding: ClassVar[Mapping[str, Any]] = {"do_classifier_free_guidance": False}

    def __init__(self, pipeline: Any, config: Config) -> None:
        experts = {"transformer": pipeline.transformer}
        # In units of the timestep: the first expert has those from here on.
        self.boundary = 0.0
        if pipeline.config.boundary_ratio is not None:
            experts["transformer_2"] = pipeline.transformer_2
            self.boundary = pipeline.config.boundary_ratio * pipeline.scheduler.config.num_train_timesteps
        elif config.guidance_scale_2 is not None:
            raise ModelError(
                f"model.guidance_scale_2={config.guidance_scale_2}: this model has no second expert",
                {"model.guidance_scale_2": None},
            )
        if any(part is None for part in experts.values()):
            raise ModelError("this Wan model leaves out one of its transformers; give a complete pipeline folder")
        Native.__init__(self, pipeline, config, nn.ModuleDict(experts) if len(experts) > 1 else None)
        self.num_frames, self.fps = config.num_frames, config.fps
        self._check_frames()

    def sides(self) -> tuple[tuple[int, int], int, int | None]:
        unit = self.pipeline.vae_scale_factor_spatial * self.settings["patch_size"][-1]
        return (480, 832), unit, self.settings["rope_max_seq_len"] * unit

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The denoisers by component name; read from `network`, which a cheaper copy may replace."""
        return component_names(self.network)

    def _check_frames(self) -> None:
        """Whole latent frames after the first, and of these whole patches."""
        step, frames, patch = self.pipeline.vae_scale_factor_temporal, self.num_frames, self.settings["patch_size"][0]
        if frames < 1 or (frames - 1) % step:
            near = near_frames(frames, step, patch)
            raise ModelError(
                f"model.num_frames={frames} must be one more than a multiple of {step}", {"model.num_frames": near}
            )
        latents = (frames - 1) // step + 1
        if latents % patch:
            raise ModelError(
                f"model.num_frames={frames} makes {latents} latent frames, and the denoiser reads {patch} at a time",
                {"model.num_frames": near_frames(frames, step, patch)},
            )

    def latent_shape(self) -> tuple[int, ...]:
        frames = (self.num_frames - 1) // self.pipeline.vae_scale_factor_temporal + 1
        scale = self.pipeline.vae_scale_factor_spatial
        return (self.settings["in_channels"], frames, self.height // scale, self.width // scale)

    def schedule(self, num_inference_steps: int) -> Schedule:
        """The scheduler's grid; its multistep solver (UniPC) is not used."""
        scheduler = self.scheduler()
        path = path_of(scheduler)
        if not path.is_flow:
            kind = type(scheduler)
            raise ModelError(f"{kind.__name__} is set up for a noise process, Wan is a flow: set use_flow_sigmas")
        scheduler.set_timesteps(num_inference_steps)
        return schedule_of(path, scheduler, scheduler.timesteps, scheduler.sigmas)

    def scheduler(self) -> Any:
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
        return call

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """Samples of both experts in one batch make two forwards, one each.

        Where processes share the weights, all of them call an expert that one of them needs: each gathers its rows from
        the others. A call without a sample takes the first one's, and counts as an evaluation.
        """
        # Fake tensors have no values: in the plan of a run the first expert stands for both.
        if len(self.experts) == 1 or isinstance(timestep, FakeTensor):
            return self._guided(True, x, timestep, cond, guidance_scale)
        # Which weights are called is a choice of the host: here, once, it waits for a GPU.
        first = (timestep >= self.boundary).cpu()
        needed = needed_anywhere([bool(first.any()), not bool(first.all())], self.network)
        if sum(needed) == 1:
            return self._guided(needed[0], x, timestep, cond, guidance_scale)
        places = [(first == own).nonzero().squeeze(1) for own in (True, False)]
        output = []
        for own, rows in zip((True, False), places, strict=True):
            called = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
            here = sent(called, x.device)
            # Of a call without a sample no row is kept; its backward pass is made with zeros.
            output.append(self._guided(own, x[here], timestep[here], cond.index(called), guidance_scale)[: len(rows)])
        return torch.cat(output)[sent(torch.cat(places).argsort(), x.device)]

    def _guided(self, first: bool, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        expert = self.experts["transformer" if first else "transformer_2"]

        def forward(x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
            if self.pipeline.config.expand_timesteps:
                # Wan 2.2 5B takes one per token, all equal without a given first frame.
                patch = self.settings["patch_size"]
                tokens = (x.shape[2] // patch[0]) * (x.shape[3] // patch[1]) * (x.shape[4] // patch[2])
                timestep = timestep[:, None].expand(-1, tokens)
            with autocast(self.device, self.dtype, self.autocasts):
                return expert(
                    hidden_states=x.to(self.dtype),
                    timestep=timestep,
                    encoder_hidden_states=cond["prompt_embeds"].to(self.dtype),
                    return_dict=False,
                )[0]

        scale = guidance_scale
        if not first and self.config.guidance_scale_2 is not None and guidance_scale > 1:
            scale = self.config.guidance_scale_2
        return guided(forward, x, timestep, cond, self.unconditional, scale, forwards=self.forwards(separate=True))

    def batch_key(self, step_index: int) -> int:
        return 0 if len(self.experts) == 1 else step_index

    def part_at(self, timestep: float) -> str:
        if len(self.experts) == 1:
            return ""
        return "transformer" if timestep >= self.boundary else "transformer_2"

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        frames = decoded_frames(self.pipeline.vae, latents, self.config.vae_precision)
        return frames[:, 0] if self.num_frames == 1 else frames

    def leading(self, latents: Tensor, frame: int) -> Tensor:
        return latents[:, :, : -(-frame // self.pipeline.vae_scale_factor_temporal) + 1]  # the decoder is causal

    @torch.no_grad()
    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        require_image_size(images, self.height, self.width, self.num_frames)
        frames = images[:, None] if self.num_frames == 1 else images
        latents = encoded_frames(self.pipeline.vae, frames.to(self.device), self.config.vae_precision, noise)
        if latents.shape[1:] != self.latent_shape():
            # Its encoder reads 4 frames at a time after the first, whatever its factor in time.
            raise ModelError(
                f"model.num_frames={self.num_frames}: the VAE makes latents {list(latents.shape[1:])} of so many given "
                f"frames, and the denoiser takes {list(self.latent_shape())}",
                {"model.num_frames": max(round((self.num_frames - 1) / 4), 1) * 4 + 1},
            )
        return latents


FAMILY = Family(
    adapter=Wan, pipeline="WanPipeline", vae="AutoencoderKLWan", channels=(16, 16), fits=lambda part: True
)  # any scheduler of a flow gives the grid
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
