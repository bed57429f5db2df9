"""tiny-wan: a WanPipeline of 9 frames at 32 px, every network at its size, and what its two stages minimise.

Configuration and recipe are those of a trial: `patch_size` 2 in the VAE, which is then taught single frames first, and
a denoiser whose patches hold all latent frames, so that a video is 16 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl import moving_shapes
from flowrl.shapes import BACKGROUND
from scripts.pretraining.text import t5_sizes, t5_tokenizer
from scripts.pretraining.training import PROMPT_DROPOUT, Model

SIZE, FRAMES, LENGTH = 32, moving_shapes.FRAMES, 12
CHANNELS, LATENT_FRAMES = 4, 5
PATCHES = {16: (LATENT_FRAMES, 2, 2), 80: (1, 2, 2)}
"""The denoiser's patch by the number of tokens."""
ONE = {"move": 0.4, "stay": 0.1, "size": 0.2, "turn": 0.3}
TWO = {"two": 2 / 3, "both": 1 / 3}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the VAE's training: `steps` steps of `batch` videos a process, of `frames` frames."""

    frames: int
    batch: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int
    processes: int
    output: Path
    """Folder of the pipeline: the VAE after the first stage, the whole after the second."""
    work: Path
    """Checkpoints of the stages and the denoiser's latents."""
    vae: tuple[Phase, ...] = (
        Phase(frames=1, batch=32, steps=5000),
        Phase(frames=5, batch=8, steps=3500),
        Phase(frames=9, batch=8, steps=4000),
    )
    vae_rate: float = 3e-3
    vae_ema: float = 0.995
    steps: int = 18_000
    rate: float = 3e-3
    decay_from: float = 0.55
    text_rate: float = 0.25
    batch_size: int = 64
    ema: float = 0.999
    videos: int = 60_000
    """Fresh videos whose latents each pool of the denoiser's stage holds."""
    pools: int = 2
    tokens: int = 16
    two_share: float = 0.25
    """Share of captions with two objects."""
    save_every: int = 500
    moments: int = 1024
    """Videos over which the latents' mean and std are measured."""
    check: int = 505
    """Held-out captions that are measured at the end."""
    look_every: int = 1500
    """Steps between two looks at strict accuracy on the way, under 3 % of the time; they move no weight. 0: none."""
    look: int = 96
    """Held-out captions of a look."""

    def facts(self, stage: str) -> dict[str, Any]:
        """What decides the weights of a stage, "vae" or "denoiser", and what the record tells of it."""
        shared = {"seed": self.seed, "processes": self.processes, "two_share": self.two_share}
        if stage == "vae":
            phases = [[phase.frames, phase.batch, phase.steps] for phase in self.vae]
            return shared | {"phases": phases, "rate": self.vae_rate, "ema": self.vae_ema}
        names = ("steps", "rate", "decay_from", "text_rate", "batch_size", "ema", "videos", "pools", "tokens")
        return shared | {name: getattr(self, name) for name in names}

    def pool_facts(self, vae: Any) -> dict[str, Any]:
        """What decides the latents of a pool: the VAE, by its latents' mean and std, and what is drawn."""
        names = ("seed", "processes", "two_share", "videos")
        return {name: getattr(self, name) for name in names} | latent_facts(vae)

    @property
    def weights(self) -> dict[str, float]:
        """Shares of the tasks."""
        one = {task: (1 - self.two_share) * share for task, share in ONE.items()}
        return one | {task: self.two_share * share for task, share in TWO.items() if self.two_share}


def latent_facts(vae: Any) -> dict[str, list[float]]:
    """What tells a trained VAE from another: mean and std of its latents."""
    return {name: getattr(vae.config, name) for name in ("latents_mean", "latents_std")}


# ---- the world


@cache
def caption_rows() -> tuple[str, ...]:
    """Every caption of the pretraining scenes; the last row is the empty one."""
    return (*moving_shapes.prompts("pretrain"), "")


@cache
def _groups(part: str) -> dict[str, list[moving_shapes.MovingScene]]:
    groups: dict[str, list[moving_shapes.MovingScene]] = {}
    for scene in moving_shapes.split(part):
        groups.setdefault(scene.task, []).append(scene)
    return groups


def draw_batch(
    rng: np.random.Generator, count: int, weights: dict[str, float], frames: int = FRAMES
) -> tuple[Tensor, list[str]]:
    """Videos [count, 3, frames, 32, 32] in [-1, 1], cut out of longer ones, with a caption each."""
    tasks, videos, texts = list(weights), [], []
    shares = np.asarray(list(weights.values()))
    for task in rng.choice(len(tasks), size=count, p=shares / shares.sum()):
        group = _groups("pretrain")[tasks[task]]
        scene = group[rng.integers(len(group))]
        placed = moving_shapes.frames_of(moving_shapes.place(scene, rng, SIZE), FRAMES)
        start = rng.integers(FRAMES - frames + 1)
        videos.append(moving_shapes.render(placed[start : start + frames], SIZE))
        texts.append(scene.forms[rng.integers(len(scene.forms))])
    return torch.from_numpy(np.stack(videos)).float().transpose(1, 2) * 2 - 1, texts


# ---- the networks


def _vae():
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=2,
        scale_factor_spatial=4,
    )
    start_as_images(vae)
    return vae


@torch.no_grad()
def start_as_images(vae: nn.Module) -> None:
    """No look at the past at first: the past taps are 0, and what resamples time hands the present on."""
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv3d) or module.kernel_size[0] == 1:
            continue
        module.weight[:, :, :-1] = 0
        if name.endswith("time_conv"):
            rows = torch.arange(module.out_channels)
            module.weight.zero_()
            module.weight[rows, rows % module.in_channels, -1, 0, 0] = 1
            nn.init.zeros_(module.bias)


def _text_encoder(tokenizer):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_sizes(tokenizer)))


def _transformer(tokens: int):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=PATCHES[tokens],
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=128,
        freq_dim=128,
        ffn_dim=480,
        num_layers=5,
        rope_max_seq_len=32,
    )


def build_pipeline(seed: int, tokens: int = 16):
    """The untrained pipeline, deterministic in `seed`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    torch.manual_seed(seed)
    words = {word for caption in caption_rows() for word in caption.split()}
    tokenizer = t5_tokenizer(sorted(words | {word for part in ("train", "heldout") for word in _words(part)}))
    # The order of these calls is the order of the draws.
    vae, text_encoder, transformer = _vae(), _text_encoder(tokenizer), _transformer(tokens)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
    )


def _words(part: str) -> set[str]:
    return {word for caption in moving_shapes.prompts(part) for word in caption.split()}


# ---- what the stages minimise


def decode(vae: Any, latents: Tensor) -> Tensor:
    """The VAE's own decoding of [B, 4, T, h, w] before it clamps, where a gradient would end."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

    past: list[Tensor | None] = [None] * sum(isinstance(m, WanCausalConv3d) for m in vae.decoder.modules())
    hidden = vae.post_quant_conv(latents)
    chunks = [
        vae.decoder(hidden[:, :, t : t + 1], feat_cache=past, feat_idx=[0], first_chunk=t == 0)
        for t in range(hidden.shape[2])
    ]
    return unpatchify(torch.cat(chunks, dim=2), patch_size=vae.config.patch_size)


def vae_loss(vae: Any, videos: Tensor, generator: torch.Generator) -> Tensor:
    """L1 + 2 MSE, four times as heavy on objects, and a light KL; of videos [B, 3, F, H, W] in [-1, 1]."""
    posterior = vae.encode(videos).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator)
    error = decode(vae, posterior.mean + posterior.std * noise) - videos
    shown = (videos - (2 * BACKGROUND - 1)).abs().amax(dim=1, keepdim=True) > 0.05
    weight = 1 + 3 * shown.float()
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    return (weight / weight.mean() * (error.abs() + 2 * error.square())).mean() + 2e-3 * kl


class FlowMatching:
    """The velocity eps - x0 at logit-normal noise levels; the captions' embeddings with gradients."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        options = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
        found = pipe.tokenizer(list(caption_rows()), **options)
        self.ids, self.mask = found.input_ids, found.attention_mask

    def embed(self, rows: Tensor) -> Tensor:
        """prompt_embeds [B, 12, 128] as the pipeline's encode_prompt builds them: zeros after the end."""
        mask = self.mask[rows]
        return self.pipe.text_encoder(self.ids[rows], mask).last_hidden_state * mask[:, :, None]

    def loss(self, latents: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Of `count` samples drawn from standardised latents [N, 4, 5, 8, 8] and their caption rows [N]; a scalar."""
        pick = torch.randint(len(latents), (count,), generator=generator)
        dropped = torch.rand(count, generator=generator) < PROMPT_DROPOUT
        row = torch.where(dropped, torch.tensor(len(self.ids) - 1), rows[pick])
        x0 = latents[pick].float()
        sigma = torch.sigmoid(0.9 + 1.2 * torch.randn(count, generator=generator))
        eps = torch.randn(x0.shape, generator=generator)
        weight = sigma[:, None, None, None, None]
        velocity = self.pipe.transformer(
            hidden_states=(1 - weight) * x0 + weight * eps,
            timestep=1000 * sigma,
            encoder_hidden_states=self.embed(row),
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, eps - x0)


def _call(steps: int, guidance_scale: float) -> tuple[dict[str, Any], float]:
    size = {"height": SIZE, "width": SIZE, "num_frames": FRAMES, "max_sequence_length": LENGTH}
    return size | {"num_inference_steps": steps, "guidance_scale": guidance_scale}, 1.0


MODEL = Model(
    pipeline="WanPipeline",
    denoiser="transformer",
    encoders=("text_encoder",),
    shifts=True,
    build=build_pipeline,
    objective=lambda pipe, settings, cycle: FlowMatching(pipe),
    cycles=(),
    calls={
        "10 steps, no CFG": _call(10, 1.0),
        "10 steps, CFG 2": _call(10, 2.0),
        "10 steps, CFG 3": _call(10, 3.0),
        "10 steps, CFG 5": _call(10, 5.0),
        "20 steps, no CFG": _call(20, 1.0),
    },
)
