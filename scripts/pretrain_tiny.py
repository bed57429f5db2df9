"""Train the tiny models of the lab from a seed: `python scripts/pretrain_tiny.py tiny-sd3` (or tiny-clip).

tiny-sd3: builds a real StableDiffusion3Pipeline (two CLIP encoders, a T5 encoder, SD3Transformer2DModel,
AutoencoderKL, FlowMatchEulerDiscreteScheduler), trains it on the shapes world, and saves it to
`assets/tiny-sd3`. Two single-thread processes by default: on a small machine they use two cores
better than two threads do. About an hour on two cores.

tiny-clip: trains an open_clip model on the same world (scripts/_tiny_clip.py) and measures on samples of tiny-sd3
how far it agrees with the verifier (scripts/_tiny_clip_measure.py). One thread, a few minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import _tiny_clip
import _tiny_clip_measure
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _tiny_sd3 import CLIP_LENGTH, build_pipeline
from torch import Tensor, nn

from flowrl import shapes

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TASK_WEIGHTS = {"single": 0.03, "color": 0.12, "counting": 0.25, "two": 0.10, "binding": 0.25, "position": 0.25}
# The length the lab uses, and now and then what a plain pipe(prompt) call pads to; SD3 has no text mask.
T5_LENGTHS = {9: 0.88, 32: 0.05, 77: 0.03, 256: 0.04}
PROMPT_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int
    processes: int
    output: Path
    vae_steps: int = 2300
    pictures: int = 120_000
    cycles: tuple[tuple[int, float, float], ...] = (
        (6500, 4e-3, 0.5),
        (3600, 2e-3, 0.2),
        (6500, 3e-3, 0.2),
        (6000, 3e-3, 0.15),
    )
    """(steps, peak learning rate, share of the steps after which it falls linearly to 0); every later cycle starts
    from the saved result of the one before."""
    first_cycle: int = 0
    """Start with this cycle, from the pipeline already in the output folder."""
    text_rate: float = 0.25
    """Learning rate of the text encoders over the denoiser's: at 1 they collapse, and word order is lost."""
    vae_from: Path | None = None
    """A pipeline whose trained VAE is taken over instead of training one."""
    batch_size: int = 64
    ema: float = 0.999
    snapshot_every: int = 1200


class Captions:
    """Token ids of every caption (the last row is the empty one), and their embeddings with gradients."""

    def __init__(self, pipe) -> None:
        self.pipe = pipe
        texts = [form for group in shapes.scenes().values() for scene in group for form in scene.forms] + [""]
        self.index = {text: i for i, text in enumerate(texts)}
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        self.clip_ids = pipe.tokenizer(texts, max_length=CLIP_LENGTH, **options).input_ids
        self.t5_ids = pipe.tokenizer_3(texts, max_length=max(T5_LENGTHS), **options).input_ids

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


def all_reduce_gradients(parameters: list[nn.Parameter], world: int) -> None:
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p).clone()
        offset += p.numel()


def draw_batch(rng: np.random.Generator, count: int) -> tuple[Tensor, list[str]]:
    tasks, weights = zip(*TASK_WEIGHTS.items(), strict=True)
    pictures, captions = [], []
    for task in rng.choice(len(tasks), size=count, p=np.asarray(weights) / sum(weights)):
        group = shapes.scenes()[tasks[task]]
        scene = group[rng.integers(len(group))]
        pictures.append(shapes.draw(scene, rng))
        captions.append(scene.forms[rng.integers(len(scene.forms))])
    return torch.from_numpy(np.stack(pictures)), captions


def log(rank: int, text: str) -> None:
    if rank == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def load_pipeline(folder: Path):
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)


def train_vae(pipe, settings: Settings, rank: int) -> None:
    """L1 + 2 MSE + a light KL; then the scale and shift that make latents standard."""
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


@torch.no_grad()
def encode_world(pipe, captions: Captions, settings: Settings, rank: int, cycle: int) -> tuple[Tensor, Tensor]:
    """(latents [N, 4, 8, 8] standardised, caption rows [N]); each rank makes its share of the pictures."""
    rng = np.random.default_rng((settings.seed, 2, rank, cycle))
    latents, rows = [], []
    for _ in range(settings.pictures // settings.processes // 500):
        images, texts = draw_batch(rng, 500)
        latents.append(pipe.vae.encode(images * 2 - 1).latent_dist.mean)
        rows.append(torch.tensor([captions.index[text] for text in texts]))
    stacked = torch.cat(latents)
    if cycle > 0:
        return (stacked - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, torch.cat(rows)
    moments = torch.stack([stacked.double().mean(), stacked.double().square().mean()])
    dist.all_reduce(moments)
    mean, square = (moments / settings.processes).tolist()
    std = math.sqrt(square - mean**2)
    pipe.vae.register_to_config(scaling_factor=round(1 / std, 6), shift_factor=round(mean, 6))
    return (stacked - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, torch.cat(rows)


def train_transformer(pipe, settings: Settings, rank: int, cycle: int) -> None:
    """Flow matching on transformer and text encoders; the average of the weights is kept."""
    steps, peak, decay_from = settings.cycles[cycle]
    captions = Captions(pipe)
    latents, rows = encode_world(pipe, captions, settings, rank, cycle)
    log(rank, f"latents {tuple(latents.shape)} scale {pipe.vae.config.scaling_factor}")
    generator = torch.Generator().manual_seed(settings.seed * 1000 + 100 * cycle + 7 + rank)
    lengths_rng = np.random.default_rng((settings.seed, 3, cycle))  # the same T5 length on every rank
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    for module in modules:
        module.train()
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    drawing = {id(p) for p in pipe.transformer.parameters()}
    groups = [
        {"params": [p for p in parameters if id(p) in drawing], "peak": peak},
        {"params": [p for p in parameters if id(p) not in drawing], "peak": settings.text_rate * peak},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    empty, started, shown = len(captions.index) - 1, time.time(), 0.0
    for step in range(1, steps + 1):
        tail = (1 - step / steps) / (1 - decay_from)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, step / 300, max(tail, 0.0))
        length = int(lengths_rng.choice(list(T5_LENGTHS), p=list(T5_LENGTHS.values())))
        # Long paddings cost up to eight times as much: a quarter of the batch is enough to get used to them.
        local = settings.batch_size // settings.processes // (4 if length > 32 else 1)
        pick = torch.randint(len(rows), (local,), generator=generator)
        row = rows[pick].clone()
        row[torch.rand(local, generator=generator) < PROMPT_DROPOUT] = empty
        sigma = torch.sigmoid(0.6 + 1.2 * torch.randn(local, generator=generator))
        x0, eps = latents[pick], torch.randn(local, *latents.shape[1:], generator=generator)
        weight = sigma[:, None, None, None]
        embeds, pooled = captions.embed(row, length)
        velocity = pipe.transformer(
            hidden_states=(1 - weight) * x0 + weight * eps,
            timestep=1000 * sigma,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, eps - x0)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        all_reduce_gradients(parameters, settings.processes)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(settings.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        shown = loss.item() if step == 1 else 0.98 * shown + 0.02 * loss.item()
        if step % 100 == 0:
            log(rank, f"cycle {cycle} flow {step}/{steps} loss {shown:.4f} {(time.time() - started) / step:.3f} s/step")
        if step % settings.snapshot_every == 0 and step < steps and rank == 0:
            with_average(parameters, average, lambda step=step: report(pipe, f"cycle {cycle} step {step}", 256))
            for module in modules:
                module.train()
    for p, value in zip(parameters, average, strict=True):
        p.data.copy_(value)


def with_average(parameters: list[nn.Parameter], average: list[Tensor], work) -> None:
    kept = [p.detach().clone() for p in parameters]
    for p, value in zip(parameters, average, strict=True):
        p.data.copy_(value)
    work()
    for p, value in zip(parameters, kept, strict=True):
        p.data.copy_(value)


@torch.no_grad()
def strict_accuracy(pipe, count: int, **call) -> dict[str, float]:
    """Strict accuracy of plain pipeline calls on held-out captions, overall and by task."""
    from rewards.shapes import detect, judge

    captions, hits = shapes.prompts("heldout")[:count], {}
    for start in range(0, len(captions), 64):
        part = captions[start : start + 64]
        generator = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        images = pipe(part, output_type="np", generator=generator, **call).images
        for scene, image in zip(map(shapes.parse, part), images.transpose(0, 3, 1, 2), strict=True):
            hits.setdefault(scene.task, []).append(judge(scene, detect(image))[0])
    flat = [hit for group in hits.values() for hit in group]
    return {"all": sum(flat) / len(flat)} | {task: sum(group) / len(group) for task, group in sorted(hits.items())}


def report(pipe, when: str, count: int, *, final: bool = False) -> dict[str, dict[str, float]]:
    """Print strict accuracy at the lab's own call and, at the end, at others."""
    pipe.set_progress_bar_config(disable=True)
    for component in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        component.eval()
    lab = {"num_inference_steps": 6, "max_sequence_length": 9}
    table = {"6 steps, no CFG": strict_accuracy(pipe, count, guidance_scale=1.0, **lab)}
    if final:
        more = lab | {"num_inference_steps": 10}
        table["10 steps, no CFG"] = strict_accuracy(pipe, count, guidance_scale=1.0, **more)
        table["10 steps, CFG 4"] = strict_accuracy(pipe, count, guidance_scale=4.0, **more)
        table["28 steps, CFG 7, max_sequence_length 9"] = strict_accuracy(pipe, count // 2, max_sequence_length=9)
        table["plain pipe(prompt)"] = strict_accuracy(pipe, count // 2)
    for name, row in table.items():
        print(f"{when}, {name}: " + " ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    return table


def save(pipe, folder: Path) -> None:
    """Transformer in half precision (loaded as float32), everything else in float32: under 12 MB."""
    from diffusers import SD3Transformer2DModel

    pipe.save_pretrained(folder)
    half = SD3Transformer2DModel.from_config(pipe.transformer.config)
    half.load_state_dict(pipe.transformer.state_dict())
    half.half().save_pretrained(folder / "transformer")
    for file in folder.rglob("*.json"):  # where this machine kept it is nobody's business
        facts = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(facts, dict) and facts.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def worker(rank: int, settings: Settings, port: int) -> None:
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=settings.processes)
    if settings.first_cycle == 0:
        pipe = build_pipeline(settings.seed)
        if settings.vae_from is None:
            train_vae(pipe, settings, rank)
        else:
            pipe.vae.load_state_dict(load_pipeline(settings.vae_from).vae.state_dict())
    for cycle in range(settings.first_cycle, len(settings.cycles)):
        if cycle > 0:
            pipe = load_pipeline(settings.output)
        pipe.vae.eval()
        train_transformer(pipe, settings, rank, cycle)
        if rank == 0:
            save(pipe, settings.output)
        dist.barrier()
    if rank == 0:
        table = report(load_pipeline(settings.output), "final", 512, final=True)
        facts = {
            "settings": {k: v for k, v in vars(settings).items() if k not in ("output", "vae_from", "first_cycle")},
            "strict": table,
        }
        (settings.output / "pretraining.json").write_text(json.dumps(facts, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True)
    sd3 = names.add_parser("tiny-sd3")
    sd3.add_argument("--seed", type=int, default=0)
    sd3.add_argument("--processes", type=int, default=2)
    sd3.add_argument("--steps", type=int, default=None, help="steps of every cycle (default: the recipe's)")
    sd3.add_argument("--first-cycle", type=int, default=0, help="go on from the pipeline in the output folder")
    sd3.add_argument("--vae-from", type=Path, default=None, help="take the VAE of this pipeline folder")
    sd3.add_argument("--vae-steps", type=int, default=Settings.vae_steps)
    sd3.add_argument("--pictures", type=int, default=Settings.pictures)
    sd3.add_argument("--port", type=int, default=29617)
    sd3.add_argument("--output", type=Path, default=ASSETS / "tiny-sd3")
    clip = names.add_parser("tiny-clip")
    clip.add_argument("--seed", type=int, default=0)
    clip.add_argument("--steps", type=int, default=_tiny_clip.Settings.steps)
    clip.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    clip.add_argument("--output", type=Path, default=ASSETS / "tiny-clip")
    args = parser.parse_args()
    if args.name == "tiny-clip":
        wanted = _tiny_clip.Settings(seed=args.seed, steps=args.steps, output=args.output)
        _tiny_clip_measure.make(wanted, only_measure=args.measure)
        return
    settings = Settings(
        seed=args.seed,
        processes=args.processes,
        output=args.output,
        cycles=tuple((args.steps or steps, *rest) for steps, *rest in Settings.cycles),
        first_cycle=args.first_cycle,
        vae_from=args.vae_from,
        vae_steps=args.vae_steps,
        pictures=args.pictures,
    )
    mp.spawn(worker, args=(settings, args.port), nprocs=settings.processes)


if __name__ == "__main__":
    main()
