"""tiny-kontext: a FluxKontextPipeline of edits at 32 px, every network at its size, and what its training minimises.

The source is 16 more tokens beside the 16 of the image. The VAE is tiny-sd3's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl import edited_shapes, shapes
from flowrl.moving_shapes import DIRECTIONS
from scripts.pretraining.text import CLIP_LENGTH, clip_config, clip_tokenizer, t5_sizes, t5_tokenizer
from scripts.pretraining.training import PROMPT_DROPOUT, Model

SIZE, LENGTH, SIDE = 32, 12, 4
OFTEN = {"add": 3, "swap": 3}
"""Operations that training draws more often than the others, since they are learned late."""
# The length the lab uses, and now and then longer paddings: FLUX has no text mask.
LENGTHS = {12: 0.94, 32: 0.03, 77: 0.02, 512: 0.01}


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int
    processes: int
    output: Path
    work: Path
    """Checkpoint and pools of latents."""
    vae_from: Path
    """The pipeline whose trained VAE is taken over."""
    steps: int = 1700
    """Few, so that much is left to learn: 2,500 make seven of ten edits right."""
    rate: float = 3e-3
    decay_from: float = 0.5
    text_rate: float = 0.25
    batch_size: int = 32
    ema: float = 0.999
    pairs: int = 60_000
    """Fresh pairs whose latents each pool holds."""
    pools: int = 1
    sigma: tuple[float, float] = (1.0, 1.2)
    """Mean and std of the noise level's logit."""
    changed: float = 3.0
    """How much heavier a token counts where the edit changes it."""
    operations: tuple[str, ...] = edited_shapes.OPERATIONS
    save_every: int = 250
    look_every: int = 500
    """Steps between two looks at strict accuracy on the way; they move no weight. 0: none."""
    look: int = 140
    check: int = 500
    """Held-out pairs of a look, and at the end."""

    def facts(self) -> dict[str, Any]:
        """What decides the weights, and what the record tells of them."""
        names = ("seed", "processes", "steps", "rate", "decay_from", "text_rate", "batch_size", "ema", "pairs", "pools")
        return {name: getattr(self, name) for name in (*names, "sigma", "changed", "operations")} | {
            **{"vae_from": self.vae_from.name, "often": OFTEN}
        }

    def pool_facts(self) -> dict[str, Any]:
        """What decides the latents of a pool."""
        return {name: getattr(self, name) for name in ("seed", "processes", "pairs", "operations")} | {"often": OFTEN}


def words() -> list[str]:
    """Every word of an instruction, in the order in which CLIP's tokenizer learns them."""
    templates = " ".join(edited_shapes.TEMPLATES.values())
    known = set(re.sub("{.*?}", "", templates).split())
    known |= {*shapes.SHAPES, *shapes.COLORS, *DIRECTIONS, "larger", "smaller"}
    known |= {word for relation in shapes.RELATIONS for word in relation.split()}
    # "remove" would cut "green".
    return sorted(known, key=lambda word: (word != "green", -len(word), word))


def draw_batch(
    rng: np.random.Generator, count: int, operations: tuple[str, ...], part: str = "pretrain"
) -> tuple[Tensor, Tensor, list[str]]:
    """(sources, results) [count, 3, 32, 32] in [0, 1], each with its instruction."""
    drawn = [name for name in operations for _ in range(OFTEN.get(name, 1))]
    pairs = [edited_shapes.draw(drawn[i], rng, SIZE, part) for i in rng.integers(len(drawn), size=count)]
    sources, results = (
        torch.from_numpy(np.stack([shapes.render(placed, SIZE) for placed in side]))
        for side in ([pair.source for pair in pairs], [pair.result for pair in pairs])
    )
    return sources, results, [pair.edit.instruction for pair in pairs]


# ---- the networks


def _clip(tokenizer):
    from transformers import CLIPTextModel

    return CLIPTextModel(
        clip_config(tokenizer, num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=192)
    )


def _t5(tokenizer):
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**t5_sizes(tokenizer)))


def _transformer():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


@torch.no_grad()
def look_at_the_place(transformer: nn.Module, size: float = 3.0) -> None:
    """Two of the four heads of every block begin by looking at their own place, the second of them in the source.

    What an edit leaves alone is a copy, which a token finds there. A bias in the fastest pair of numbers of an axis,
    alike in queries and keys, makes nearness along it count; one turned by a step, the step from image to source.
    """
    down, across, kind = 8, 20, 0  # where each axis begins in a head (axes_dims_rope)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        for head in range(2):
            start = 32 * head
            for linear, turn in ((block.attn.to_q, 0.0), (block.attn.to_k, 1.0)):
                linear.bias[start + down] = linear.bias[start + across] = size
                if head == 1:
                    linear.bias[start + kind] = size * math.cos(turn)
                    linear.bias[start + kind + 1] = -size * math.sin(turn)


def build_pipeline(seed: int, vae_from: Path):
    """The untrained pipeline, deterministic in `seed`, with the trained VAE."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline

    torch.manual_seed(seed)
    tokenizer, tokenizer_2 = clip_tokenizer(words()), t5_tokenizer(words())
    # The order of these calls is the order of the draws.
    t5, transformer, clip = _t5(tokenizer_2), _transformer(), _clip(tokenizer)
    look_at_the_place(transformer)
    vae = AutoencoderKL.from_pretrained(vae_from, subfolder="vae")
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval().requires_grad_(False),
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


# ---- what training minimises


def packed(latents: Tensor) -> Tensor:
    """Tokens [B, 16, 16] of latents [B, 4, 8, 8], as the pipeline packs them."""
    count, channels = latents.shape[:2]
    blocks = latents.view(count, channels, SIDE, 2, SIDE, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(count, SIDE * SIDE, 4 * channels)


def token_places() -> Tensor:
    """Positions [32, 3] of the image's tokens and of the source's, whose first coordinate is 1."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1).float()
    return torch.cat([places, places + torch.tensor([1.0, 0.0, 0.0])])


class FlowMatching:
    """The velocity eps - x0 at logit-normal noise levels; the instructions' embeddings with gradients."""

    def __init__(self, pipe: Any, settings: Settings) -> None:
        self.pipe, self.settings, self.places = pipe, settings, token_places()
        self.empty = self.read([""])

    def read(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Token numbers for CLIP and for T5, [N, 12] each."""
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        clip = self.pipe.tokenizer(texts, max_length=CLIP_LENGTH, **options).input_ids
        return clip, self.pipe.tokenizer_2(texts, max_length=LENGTH, **options).input_ids

    def embed(self, clip: Tensor, t5: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(prompt_embeds [B, length, 128], pooled [B, 64]) as the pipeline's encode_prompt builds them."""
        pooled = self.pipe.text_encoder(clip, output_hidden_states=False).pooler_output
        padded = F.pad(t5, (0, length - t5.shape[1]), value=self.pipe.tokenizer_2.pad_token_id)
        return self.pipe.text_encoder_2(padded, output_hidden_states=False)[0], pooled

    def predict(self, x: Tensor, source: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        """Velocity [B, 16, 16] at tokens x with the source's tokens beside them."""
        return self.pipe.transformer(
            hidden_states=torch.cat([x, source], dim=1),
            timestep=sigma,
            guidance=None,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3),
            img_ids=self.places,
            return_dict=False,
        )[0][:, : x.shape[1]]

    def loss(self, pool: dict[str, Tensor], count: int, generator: torch.Generator) -> Tensor:
        """Of `count` pairs drawn from a pool of standardised latents [N, 4, 8, 8] and token numbers; a scalar."""
        share = torch.tensor(list(LENGTHS.values()))
        length = list(LENGTHS)[int(torch.multinomial(share, 1, generator=generator))]
        # Long paddings cost many times as much: a part of the batch is enough to get used to them.
        count //= 8 if length > 77 else 2 if length > 32 else 1
        pick = torch.randint(len(pool["source"]), (count,), generator=generator)
        source, x0 = (packed(pool[name][pick].float()) for name in ("source", "result"))
        clip, t5 = pool["clip"][pick].long(), pool["t5"][pick].long()
        dropped = torch.rand(count, generator=generator) < PROMPT_DROPOUT
        clip[dropped], t5[dropped] = self.empty
        mean, std = self.settings.sigma
        sigma = torch.sigmoid(mean + std * torch.randn(count, generator=generator))
        eps = torch.randn(x0.shape, generator=generator)
        level = sigma[:, None, None]
        velocity = self.predict((1 - level) * x0 + level * eps, source, sigma, *self.embed(clip, t5, length))
        weight = 1 + self.settings.changed * ((x0 - source).abs().mean(dim=-1) > 0.1)
        error = (velocity - (eps - x0)).square().mean(dim=-1)
        return (weight * error).sum() / weight.sum()


CALL = {"height": SIZE, "width": SIZE, "max_area": SIZE * SIZE, "_auto_resize": False, "max_sequence_length": LENGTH}


def _call(steps: int, true_cfg_scale: float = 1.0) -> tuple[dict[str, Any], float]:
    guidance = {"true_cfg_scale": true_cfg_scale, "negative_prompt": ""} if true_cfg_scale > 1 else {}
    return CALL | guidance | {"num_inference_steps": steps}, 1.0


MODEL = Model(
    pipeline="FluxKontextPipeline",
    denoiser="transformer",
    encoders=("text_encoder", "text_encoder_2"),
    shifts=True,
    build=build_pipeline,
    objective=lambda pipe, settings, cycle: FlowMatching(pipe, settings),
    cycles=(),
    calls={
        "10 steps, no CFG": _call(10),
        "6 steps, no CFG": _call(6),
        "20 steps, no CFG": _call(20),
        "10 steps, CFG 2": _call(10, 2.0),
    },
)
