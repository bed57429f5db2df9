"""tiny-sd3: a StableDiffusion3Pipeline, every network at its size, and flow matching on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.pretraining.text import CLIP_LENGTH, clip_config, clip_tokenizer, t5_sizes, t5_tokenizer
from scripts.pretraining.training import Model, Settings, caption_rows, draw

# The length the lab uses, and now and then what a plain pipe(prompt) call pads to; SD3 has no text mask.
T5_LENGTHS = {9: 0.88, 32: 0.05, 77: 0.03, 256: 0.04}


def _clip(tokenizer):
    from transformers import CLIPTextModelWithProjection

    # SD3 reads hidden_states[-2]: three layers give two to the tokens.
    sizes = {"hidden_size": 64, "intermediate_size": 192, "projection_dim": 64}
    return CLIPTextModelWithProjection(clip_config(tokenizer, num_hidden_layers=3, num_attention_heads=4, **sizes))


def _t5(tokenizer):
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**t5_sizes(tokenizer)))


def tiny_vae():
    """4x down to 4 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _transformer():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=8,
    )


def build_pipeline(seed: int):
    """The untrained pipeline, about 3.6 M parameters, deterministic in `seed`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    torch.manual_seed(seed)
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    # The order of these calls is the order of the draws.
    t5, vae, transformer = _t5(tokenizer_3), tiny_vae(), _transformer()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=tokenizer_3,
    )


class FlowMatching:
    """The velocity eps - x0 at logit-normal noise levels; the captions' embeddings with gradients."""

    def __init__(self, pipe: Any, settings: Settings, cycle: int) -> None:
        self.pipe = pipe
        texts = list(caption_rows())
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        self.clip_ids = pipe.tokenizer(texts, max_length=CLIP_LENGTH, **options).input_ids
        self.t5_ids = pipe.tokenizer_3(texts, max_length=max(T5_LENGTHS), **options).input_ids
        self._lengths = np.random.default_rng((settings.seed, 3, cycle))  # the same T5 length on every rank

    def embed(self, rows: Tensor, t5_length: int) -> tuple[Tensor, Tensor]:
        """(prompt_embeds [B, 12 + t5_length, 128], pooled [B, 128]) as the pipeline's encode_prompt builds them."""
        tokens, pooled = [], []
        for encoder in (self.pipe.text_encoder, self.pipe.text_encoder_2):
            out = encoder(self.clip_ids[rows], output_hidden_states=True)
            tokens.append(out.hidden_states[-2])
            pooled.append(out.text_embeds)
        t5 = self.pipe.text_encoder_3(self.t5_ids[rows, :t5_length])[0]
        clip = torch.cat(tokens, dim=-1)
        clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat([clip, t5], dim=1), torch.cat(pooled, dim=-1)

    def loss(self, latents: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
        length = int(self._lengths.choice(list(T5_LENGTHS), p=list(T5_LENGTHS.values())))
        # Long paddings cost up to eight times as much: a quarter of the batch is enough to get used to them.
        count //= 4 if length > 32 else 1
        x0, row = draw(latents, rows, count, generator)
        sigma = torch.sigmoid(0.6 + 1.2 * torch.randn(count, generator=generator))
        eps = torch.randn(x0.shape, generator=generator)
        weight = sigma[:, None, None, None]
        embeds, pooled = self.embed(row, length)
        velocity = self.pipe.transformer(
            hidden_states=(1 - weight) * x0 + weight * eps,
            timestep=1000 * sigma,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, eps - x0)


def _call(steps: int, guidance_scale: float) -> dict[str, Any]:
    return {"num_inference_steps": steps, "guidance_scale": guidance_scale, "max_sequence_length": 9}


MODEL = Model(
    pipeline="StableDiffusion3Pipeline",
    denoiser="transformer",
    encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
    shifts=True,
    build=build_pipeline,
    objective=FlowMatching,
    cycles=((6500, 4e-3, 0.5), (3600, 2e-3, 0.2), (6500, 3e-3, 0.2), (6000, 3e-3, 0.15)),
    calls={
        "6 steps, no CFG": (_call(6, 1.0), 1.0),
        "10 steps, no CFG": (_call(10, 1.0), 1.0),
        "10 steps, CFG 4": (_call(10, 4.0), 1.0),
        "28 steps, CFG 7, max_sequence_length 9": ({"max_sequence_length": 9}, 0.5),
        "plain pipe(prompt)": ({}, 0.5),
    },
)
