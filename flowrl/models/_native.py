"""What native adapters have in common: a flow pipeline taken apart, frozen but for its denoiser, its encoders freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.process import FlowProcess, PredictionType, Process
from flowrl.models.base import ModelConfig, check_size, lacks, require_picture_size, torch_dtype
from flowrl.models.savings import place, switch_on
from flowrl.models.weights import component_names

Part = Callable[[str], dict[str, Any]]
"""Name of a component -> its configuration, as a checkpoint has it in JSON."""
NO_ENCODERS = "the text encoders were freed; encode every prompt before free_text_encoders()"


def on_euler(part: Part) -> bool:
    """Whether a checkpoint has the plain flow scheduler, whose grid the families make themselves."""
    return part("scheduler").get("_class_name") == "FlowMatchEulerDiscreteScheduler"


class Native:
    """`pipeline` holds every part, `network` what is trained; a family adds its encoding, schedule and forward.

    Args:
        pipeline: a diffusers pipeline of the family.
        config: the family's Config.
        network: what is trained, if it is not the pipeline's transformer alone.
    """

    config: Any
    """The family's own, set by it."""
    process: Process = FlowProcess()
    prediction_type: PredictionType = "velocity"

    def __init__(self, pipeline: Any, config: ModelConfig, network: nn.Module | None = None) -> None:
        self.pipeline = pipeline
        self.config: Any = config
        self._had_encoder = pipeline.text_encoder is not None
        self.network: nn.Module = pipeline.transformer if network is None else network
        self.device = torch.device("cpu")
        self._dtype = torch_dtype(config.dtype)
        self.unconditional: Condition | None = None  # of the negative prompt, one row; encode() makes it
        for name, part in pipeline.components.items():
            if part is not None and (name == "vae" or name.startswith("text_encoder")):
                part.requires_grad_(False).eval()
        self.network.eval()
        switch_on(pipeline, component_names(self.network).values(), config)

    def _sides(
        self, config: ModelConfig, default: tuple[int, int], unit: int, largest: int | None = None
    ) -> tuple[int, int]:
        """(height, width) in pixels, as configured or by default.

        Raises:
            ModelError: a side is no multiple of `unit`, or above `largest`.
        """
        height = default[0] if config.height is None else config.height
        width = default[1] if config.width is None else config.width
        check_size("height", height, unit, largest)
        check_size("width", width, unit, largest)
        return height, width

    def _require_encoders(self) -> None:
        if self.pipeline.text_encoder is None:
            kind = type(self.pipeline).__name__
            raise ModelError(NO_ENCODERS if self._had_encoder else lacks(kind, "text_encoder"))

    def free_text_encoders(self) -> None:
        for name in [name for name in self.pipeline.components if name.startswith("text_encoder")]:
            setattr(self.pipeline, name, None)
        gc.collect()

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        """Arguments with which the pipeline's own call draws one prompt as configured.

        Where the configuration sets another shift, the pipeline is given a scheduler that has it.
        """
        return {
            "num_inference_steps": steps,
            "guidance_scale": guidance_scale,
            "height": self.height,
            "width": self.width,
            "max_sequence_length": self.config.max_sequence_length,
        }

    def batch_key(self, step_index: int) -> int:
        return 0

    def to(self, device: torch.device) -> None:
        place(self.pipeline, self.config, device)
        self.device = device
        if self.unconditional is not None:
            self.unconditional = self.unconditional.to(device)


class NativeImages(Native):
    """A family whose VAE is an AutoencoderKL: pictures to latents and back by one shift and scale for all channels."""

    height: int
    width: int

    @property
    def _shift(self) -> float:
        """Of the VAE's latents."""
        return self.pipeline.vae.config.shift_factor or 0.0

    def _packed(self, latents: Tensor) -> Tensor:
        """The VAE's latents [B, C, h, w] as the network has them."""
        return latents

    def _unpacked(self, latents: Tensor) -> Tensor:
        """The network's latents as the VAE has them, [B, C, h, w]."""
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = self._unpacked(latents) / vae.config.scaling_factor + self._shift
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode_pictures(self, pictures: Tensor, noise: Tensor | None = None) -> Tensor:
        """Clean latents of pictures: `models.base.encoded_pictures`."""
        require_picture_size(pictures, self.height, self.width)
        vae = self.pipeline.vae
        law = vae.encode(2 * pictures.to(self.device, vae.dtype) - 1).latent_dist
        latents = self._packed(law.mean.float())
        if noise is not None:
            if noise.shape != latents.shape:
                raise ValueError(f"noise {tuple(noise.shape)} must be shaped like the latents {tuple(latents.shape)}")
            latents = latents + self._packed(law.std.float()) * noise.to(self.device)
        return (latents - self._shift) * vae.config.scaling_factor
