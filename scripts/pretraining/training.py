"""Training of the tiny pipelines on the shapes world: VAE, latents, denoiser with its text encoders, saving.

What a model is (`sd3.py`, `sd.py`) it says in a `Model`: its parts, its loss, and the calls at which its
accuracy is reported. Training runs in cycles; each starts from the saved result of the one before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowrl import shapes
from scripts.pretraining.text import captions

TASK_WEIGHTS = {"single": 0.03, "color": 0.12, "counting": 0.25, "two": 0.10, "binding": 0.25, "position": 0.25}
PROMPT_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int
    processes: int
    output: Path
    cycles: tuple[tuple[int, float, float], ...]
    """(steps, peak learning rate, share of the steps after which it falls linearly to 0)."""
    vae_steps: int = 2300
    images: int = 120_000
    first_cycle: int = 0
    """Start with this cycle, from the pipeline already in the output folder."""
    text_rate: float = 0.25
    """Learning rate of the text encoders over the denoiser's: at 1 they collapse, and word order is lost."""
    vae_from: Path | None = None
    """A pipeline whose trained VAE is taken over instead of training one."""
    batch_size: int = 64
    ema: float = 0.999
    snapshot_every: int = 1200

    def facts(self) -> dict[str, Any]:
        """What `pretraining.json` tells of them: how the VAE was trained, or whose it is."""
        facts = {k: v for k, v in vars(self).items() if k not in ("output", "vae_from", "first_cycle")}
        return facts if self.vae_from is None else facts | {"vae_steps": 0, "vae_from": self.vae_from.name}


class Objective(Protocol):
    """What a denoiser learns in one cycle."""

    def loss(self, latents: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Of `count` samples drawn (`draw`) from latents [N, 4, 8, 8] and their caption rows [N]; a scalar."""
        ...


@dataclass(frozen=True, kw_only=True)
class Model:
    """What training needs to know of a pipeline."""

    pipeline: str
    """Its class in diffusers."""
    denoiser: str
    encoders: tuple[str, ...]
    shifts: bool
    """Whether the pipeline knows the VAE's `shift_factor`, or its `scaling_factor` alone."""
    build: Callable[[int], Any]
    """The untrained pipeline from a seed."""
    objective: Callable[[Any, Settings, int], Objective]
    """From pipeline, settings and cycle."""
    cycles: tuple[tuple[int, float, float], ...]
    calls: Mapping[str, tuple[dict[str, Any], float]]
    """Calls whose accuracy is reported, by their names: (arguments, share of the captions). The lab's is the first."""

    def load(self, folder: Path) -> Any:
        import diffusers

        return getattr(diffusers, self.pipeline).from_pretrained(folder, torch_dtype=torch.float32)

    def trained(self, pipe: Any) -> list[nn.Module]:
        """The denoiser first, then the text encoders."""
        return [getattr(pipe, name) for name in (self.denoiser, *self.encoders)]


# ---- the world


@cache
def caption_rows() -> tuple[str, ...]:
    """Every caption; the last row is the empty one."""
    return (*captions(), "")


def draw_batch(rng: np.random.Generator, count: int) -> tuple[Tensor, list[str]]:
    """Pictures [count, 3, 32, 32] in [0, 1] with a caption each; tasks by their weights."""
    tasks, weights = zip(*TASK_WEIGHTS.items(), strict=True)
    images, texts = [], []
    for task in rng.choice(len(tasks), size=count, p=np.asarray(weights) / sum(weights)):
        group = shapes.scenes()[tasks[task]]
        scene = group[rng.integers(len(group))]
        images.append(shapes.draw(scene, rng))
        texts.append(scene.forms[rng.integers(len(scene.forms))])
    return torch.from_numpy(np.stack(images)), texts


def draw(latents: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(x0 [count, 4, 8, 8], caption rows [count]), some of them the empty caption's."""
    pick = torch.randint(len(rows), (count,), generator=generator)
    row = rows[pick].clone()
    row[torch.rand(count, generator=generator) < PROMPT_DROPOUT] = len(caption_rows()) - 1
    return latents[pick], row


@torch.no_grad()
def encode_world(pipe: Any, model: Model, settings: Settings, rank: int, cycle: int) -> tuple[Tensor, Tensor]:
    """(latents [N, 4, 8, 8] standardised, caption rows [N]); each rank makes its share of the pictures."""
    rng = np.random.default_rng((settings.seed, 2, rank, cycle))
    index = {text: row for row, text in enumerate(caption_rows())}
    latents, rows = [], []
    for _ in range(settings.images // settings.processes // 500):
        images, texts = draw_batch(rng, 500)
        latents.append(pipe.vae.encode(images * 2 - 1).latent_dist.mean)
        rows.append(torch.tensor([index[text] for text in texts]))
    stacked = torch.cat(latents)
    if cycle == 0:
        _standardise(pipe.vae, stacked, model, settings)
    facts = pipe.vae.config
    return (stacked - (facts.shift_factor or 0)) * facts.scaling_factor, torch.cat(rows)


def _standardise(vae: nn.Module, latents: Tensor, model: Model, settings: Settings) -> None:
    """Scale and, where the pipeline knows one, shift that make latents standard, over all processes."""
    moments = torch.stack([latents.double().mean(), latents.double().square().mean()])
    dist.all_reduce(moments)
    mean, square = (moments / settings.processes).tolist()
    shift = mean if model.shifts else 0.0
    std = math.sqrt(square - 2 * shift * mean + shift**2)
    vae.register_to_config(scaling_factor=round(1 / std, 6), shift_factor=round(mean, 6) if model.shifts else None)


# ---- training


def all_reduce_gradients(parameters: list[nn.Parameter], world: int) -> None:
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p).clone()
        offset += p.numel()


def log(rank: int, text: str) -> None:
    if rank == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def train_vae(pipe: Any, settings: Settings, rank: int) -> None:
    """L1 + 2 MSE + a light KL; the scale and shift that make latents standard follow with the latents."""
    vae, rng = pipe.vae, np.random.default_rng((settings.seed, 1, rank))
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2.5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(settings.vae_steps):
        progress = step / settings.vae_steps
        optimizer.param_groups[0]["lr"] = 2.5e-3 * min(1.0, step / 100) * min(1.0, (1 - progress) / 0.5)
        images = draw_batch(rng, 32 // settings.processes)[0] * 2 - 1
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = (decoded - images).abs().mean() + 2 * (decoded - images).square().mean() + 2e-3 * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        all_reduce_gradients(parameters, settings.processes)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 200 == 0:
            log(rank, f"vae {step}/{settings.vae_steps} loss {loss.item():.4f}")


def train_denoiser(
    pipe: Any, model: Model, settings: Settings, rank: int, cycle: int, snapshot: Callable[[Any, str], object]
) -> None:
    """One cycle on denoiser and text encoders; the average of the weights is kept."""
    steps, peak, decay_from = settings.cycles[cycle]
    objective = model.objective(pipe, settings, cycle)
    latents, rows = encode_world(pipe, model, settings, rank, cycle)
    log(rank, f"latents {tuple(latents.shape)} scale {pipe.vae.config.scaling_factor}")
    generator = torch.Generator().manual_seed(settings.seed * 1000 + 100 * cycle + 7 + rank)
    modules = model.trained(pipe)
    for module in modules:
        module.train()
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    drawing = {id(p) for p in modules[0].parameters()}
    groups = [
        {"params": [p for p in parameters if id(p) in drawing], "peak": peak},
        {"params": [p for p in parameters if id(p) not in drawing], "peak": settings.text_rate * peak},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    started, shown = time.time(), 0.0
    for step in range(1, steps + 1):
        tail = (1 - step / steps) / (1 - decay_from)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, step / 300, max(tail, 0.0))
        loss = objective.loss(latents, rows, settings.batch_size // settings.processes, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        all_reduce_gradients(parameters, settings.processes)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(settings.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        shown = loss.item() if step == 1 else 0.98 * shown + 0.02 * loss.item()
        if step % 100 == 0:
            log(rank, f"cycle {cycle} step {step}/{steps} loss {shown:.4f} {(time.time() - started) / step:.3f} s/step")
        if step % settings.snapshot_every == 0 and step < steps and rank == 0:
            with_average(parameters, average, lambda step=step: snapshot(pipe, f"cycle {cycle} step {step}"))
            for module in modules:
                module.train()
    for p, value in zip(parameters, average, strict=True):
        p.data.copy_(value)


def with_average(parameters: list[nn.Parameter], average: list[Tensor], work: Callable[[], object]) -> None:
    kept = [p.detach().clone() for p in parameters]
    for p, value in zip(parameters, average, strict=True):
        p.data.copy_(value)
    work()
    for p, value in zip(parameters, kept, strict=True):
        p.data.copy_(value)


def save(pipe: Any, model: Model, folder: Path) -> None:
    """Denoiser in half precision (loaded as float32), everything else in float32: under 12 MB."""
    pipe.save_pretrained(folder)
    denoiser = getattr(pipe, model.denoiser)
    half = type(denoiser).from_config(denoiser.config)
    half.load_state_dict(denoiser.state_dict())
    half.half().save_pretrained(folder / model.denoiser)
    for file in folder.rglob("*.json"):  # where this machine kept it is nobody's business
        facts = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(facts, dict) and facts.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
