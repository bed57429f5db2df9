"""FLUX.1: FluxPipeline called part by part, on packed latents [B, tokens, 64].

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is embedded by distilled checkpoints
(FLUX.1-dev: 3.5) and costs no second forward; a checkpoint without that input (schnell) ignores it, as the pipeline
does. True CFG is separate: `model.true_cfg_scale`, the same in rollout, training and evaluation. Text: pooled CLIP, and
T5 without a mask, so its padding is part of the input. In bfloat16 the network rounds its timestep to 8 bits, as in the
pipeline.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Condition
from flowrl.models._guidance import guided
from flowrl.models._native import JOINT_ATTENTION, Family, FlowConfig, Native
from flowrl.models.base import autocast

# yifan123/flow_grpo:scripts/train_flux.py. The attention names are those of the single-stream blocks too.
LORA_TARGETS = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(FlowConfig):
    true_cfg_scale: float = 1.0
    """Scale of classifier-free guidance in addition to the embedded value; 1: none."""
    negative_prompt: str = ""
    """Prompt that true CFG leads away from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.true_cfg_scale < 1:
            raise ValueError(f"true_cfg_scale={self.true_cfg_scale} must be at least 1, which means none")


class Flux(Native):
    lora_targets = LORA_TARGETS
    channel_axis = 2
    patch = 2
    pooled_width = "pooled_projection_dim"
    embeddings = ("prompt_embeds", "pooled")

    def negative(self) -> Condition | None:
        return super().negative() if self.config.true_cfg_scale > 1 else None

    def branches(self, guidance_scale: float) -> int:
        return 1 + (self.config.true_cfg_scale > 1)

    @property
    def takes_guidance(self) -> bool:
        return bool(self.settings["guidance_embeds"])

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale)
        if self.config.true_cfg_scale > 1:
            call |= {"true_cfg_scale": self.config.true_cfg_scale, "negative_prompt": self.config.negative_prompt}
        return call

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        def forward(x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
            return self._forward(x, timestep, cond, guidance_scale)

        scale = self.config.true_cfg_scale
        return guided(forward, x, timestep, cond, self.unconditional, scale, forwards=self.forwards())

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        embeds = cond["prompt_embeds"].to(self.dtype)
        guidance = None
        if self.settings["guidance_embeds"]:
            guidance = torch.full((len(x),), guidance_scale, device=x.device)
        with x.device:  # made there: a copy from the host would wait for a GPU
            # The pipeline's own positions have no public name.
            places = self.pipeline._prepare_latent_image_ids(len(x), *self.tokens(), x.device, torch.float32)
        with autocast(self.device, self.dtype, self.autocasts):
            return self.network(
                hidden_states=x.to(self.dtype),
                timestep=timestep / 1000,
                guidance=guidance,
                pooled_projections=cond["pooled"].to(self.dtype),
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=x.device),
                img_ids=places,
                return_dict=False,
            )[0]


FAMILY = Family(adapter=Flux, pipeline="FluxPipeline", channels=(64, 4), patch=Flux.patch)
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
