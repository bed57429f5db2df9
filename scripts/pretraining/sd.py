"""tiny-sd: a StableDiffusionPipeline (UNet, eps prediction, DDIM as SD 1.5 sets it), and denoising as its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.pretraining.sd3 import tiny_vae
from scripts.pretraining.text import clip_config, clip_tokenizer
from scripts.pretraining.training import Model, Settings, caption_rows, draw

TEXT_WIDTH = 128


def _unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        # Attention at 4 x 4 alone: at 8 x 8 as well, a step takes a third longer.
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(64, 128),
        layers_per_block=1,
        attention_head_dim=4,  # heads, as in SD 1.5's configuration
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=16,
    )


def _scheduler():
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def build_pipeline(seed: int):
    """The untrained pipeline, deterministic in `seed`."""
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPTextModel

    torch.manual_seed(seed)
    tokenizer = clip_tokenizer()
    # The order of these calls is the order of the draws.
    vae, unet = tiny_vae(), _unet()
    sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": 3 * TEXT_WIDTH}
    text_encoder = CLIPTextModel(clip_config(tokenizer, num_hidden_layers=3, num_attention_heads=4, **sizes))
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


class Denoising:
    """The squared error of eps, weighted by 1 + sigma / alpha at x = alpha x0 + sigma eps.

    That is halfway, geometrically, to the velocity of a flow at the same ratio of signal and noise: an error e of eps
    is one of (1 + sigma / alpha) e of eps - x0. Unweighted, the loss hardly sees the noisy steps, where a picture's
    objects are decided; with the flow's own weight the others are learned late (docs/lab/notes.md).
    """

    def __init__(self, pipe: Any, settings: Settings, cycle: int) -> None:
        self.pipe = pipe
        self.ids = pipe.tokenizer(list(caption_rows()), padding="max_length", return_tensors="pt").input_ids
        squares = pipe.scheduler.alphas_cumprod
        self.alpha, self.sigma = squares.sqrt(), (1 - squares).sqrt()

    def loss(self, latents: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
        x0, row = draw(latents, rows, count, generator)
        # One timestep in each of `count` equal stretches: uniform, and every batch covers the schedule.
        place = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        timestep = (place * len(self.alpha)).long().clamp(max=len(self.alpha) - 1)  # rounding may reach 1
        eps = torch.randn(x0.shape, generator=generator)
        alpha, sigma = (table[timestep][:, None, None, None] for table in (self.alpha, self.sigma))
        embeds = self.pipe.text_encoder(self.ids[row])[0]
        predicted = self.pipe.unet(alpha * x0 + sigma * eps, timestep, embeds, return_dict=False)[0]
        return ((1 + sigma / alpha) * (predicted - eps).square()).mean()


def _call(steps: int, guidance_scale: float) -> dict[str, Any]:
    return {"num_inference_steps": steps, "guidance_scale": guidance_scale}


MODEL = Model(
    pipeline="StableDiffusionPipeline",
    denoiser="unet",
    encoders=("text_encoder",),
    shifts=False,
    build=build_pipeline,
    objective=Denoising,
    cycles=((4000, 2e-3, 0.4),),
    calls={
        "10 steps, no CFG": (_call(10, 1.0), 1.0),
        "8 steps, no CFG": (_call(8, 1.0), 1.0),
        "20 steps, no CFG": (_call(20, 1.0), 1.0),
        "10 steps, CFG 4": (_call(10, 4.0), 1.0),
        "20 steps, CFG 4": (_call(20, 4.0), 1.0),
        "plain pipe(prompt): 50 steps, CFG 7.5": ({}, 0.5),
    },
)
