"""The two stages of tiny-wan, VAE and denoiser, each resumed where it was stopped, and the record of the result."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl import moving_shapes
from flowrl.core.files import write_atomically
from scripts.pretraining.report import quiet
from scripts.pretraining.stages import Stage, Told, check_facts, ramp
from scripts.pretraining.training import log, save
from scripts.pretraining.wan import (
    MODEL,
    FlowMatching,
    Settings,
    build_pipeline,
    caption_rows,
    decode,
    draw_batch,
    latent_facts,
    vae_loss,
)

RECORD = "pretraining.json"
FINGERPRINT = {"prompt": "a red circle moves left", "seed": 0}
WARM = {"vae": 100, "denoiser": 300}
_VAE, _DENOISER, _POOL, _MOMENTS, _CHECK = range(5)


def worker(rank: int, stages: tuple[str, ...], settings: Settings, port: int) -> None:
    """One process of the training; the first of them saves, measures and tells."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=settings.processes)
    for stage in stages:
        {"vae": train_vae, "denoiser": train_denoiser}[stage](settings, rank)
    if rank == 0 and "denoiser" in stages:
        record(settings.output, settings, settings.check)
    dist.barrier()
    dist.destroy_process_group()


def _rng(settings: Settings, *place: int) -> np.random.Generator:
    return np.random.default_rng((settings.seed, *place))


def _noise(settings: Settings, stage: int, step: int, rank: int) -> torch.Generator:
    """A generator of this step alone."""
    return torch.Generator().manual_seed(int(_rng(settings, stage, 1, step, rank).integers(2**62)))


# ---- the VAE


def train_vae(settings: Settings, rank: int) -> None:
    """The phases one after another; then its latents' mean and std are measured and kept in its configuration.

    What the output folder then holds, the VAE and the start of `pretraining.json`, is all that the next stage needs.
    """
    vae = MODEL.build(settings.seed).vae
    stage = Stage([([vae], settings.vae_rate)], average=settings.vae_ema, processes=settings.processes)
    file, facts = settings.work / "vae.safetensors", settings.facts("vae")
    done = stage.load(file, facts)
    plan = [phase for phase in settings.vae for _ in range(phase.steps)]
    told = Told(rank, "vae", len(plan))
    for step, phase in enumerate(plan[done:], done + 1):
        videos = draw_batch(_rng(settings, _VAE, step, rank), phase.batch, settings.weights, phase.frames)[0]
        loss = vae_loss(vae, videos, _noise(settings, _VAE, step, rank))
        stage.update(loss, step, ramp(step, len(plan), warm=WARM["vae"], decay_from=0.6))
        told.add(step, loss.item())
        if rank == 0 and (step % settings.save_every == 0 or step == len(plan)):
            stage.save(file, step, facts)
        if rank == 0 and _looks(settings, step, len(plan)):
            with stage.averaged():
                share = vae_strict(vae, settings.seed, settings.look)
            log(0, f"vae {step}, strict of {settings.look} rendered videos: {_row(share)}")
    stage.finish()
    if rank == 0:
        _standardise(vae.eval(), settings)
        # A denoiser that is there already was trained with another VAE: the folder is no pipeline any more.
        (settings.output / "model_index.json").unlink(missing_ok=True)
        vae.save_pretrained(settings.output / "vae")
        share = vae_strict(vae, settings.seed, settings.check)
        log(0, "vae, strict of rendered videos: " + _row(share))
        _write(settings.output, {"settings": {"vae": facts}, "captions": settings.check, "vae_strict": share})
    dist.barrier()


@torch.no_grad()
def _standardise(vae: Any, settings: Settings) -> None:
    """Mean and std of every channel of the latents, written into the VAE's configuration."""
    rng, parts = _rng(settings, _MOMENTS), []
    for start in range(0, settings.moments, 64):
        videos = draw_batch(rng, min(64, settings.moments - start), settings.weights)[0]
        parts.append(vae.encode(videos).latent_dist.mean)
    channels = torch.cat(parts).double().transpose(0, 1).flatten(1)
    mean, std = channels.mean(dim=1), channels.std(dim=1)
    vae.register_to_config(latents_mean=[round(x, 6) for x in mean.tolist()])
    vae.register_to_config(latents_std=[round(x, 6) for x in std.tolist()])


@torch.no_grad()
def vae_strict(vae: Any, seed: int, count: int) -> dict[str, float]:
    """Share of rendered held-out videos that are strictly right after the VAE's round trip, overall and by task."""
    from flowrl.rewards.shapes_motion import score_video

    rng, hits = np.random.default_rng((seed, _CHECK)), {}
    scenes = (moving_shapes.split("heldout") * (1 + count // 250))[:count]
    for scene in scenes:
        video = torch.from_numpy(moving_shapes.draw(scene, rng)).float().transpose(0, 1)[None] * 2 - 1
        decoded = decode(vae, vae.encode(video).latent_dist.mean).clamp(-1, 1)[0].transpose(0, 1) / 2 + 0.5
        hits.setdefault(scene.task, []).append(score_video(scene, decoded.numpy())[0])
    return _shares(hits)


# ---- the denoiser


def train_denoiser(settings: Settings, rank: int) -> None:
    """Denoiser and text encoder on pools of latents; then the whole pipeline is saved."""
    pipe = build_pipeline(settings.seed, settings.tokens)
    _take_vae(pipe.vae, settings.output)
    denoiser, *encoders = MODEL.trained(pipe)
    groups = [([denoiser], settings.rate), (encoders, settings.text_rate * settings.rate)]
    stage = Stage(groups, average=settings.ema, processes=settings.processes)
    file, facts = settings.work / "denoiser.safetensors", settings.facts("denoiser") | latent_facts(pipe.vae)
    done = stage.load(file, facts)
    objective, told = FlowMatching(pipe), Told(rank, "denoiser", settings.steps)
    pool, held = -1, None
    for step in range(done + 1, settings.steps + 1):
        wanted = (step - 1) * settings.pools // settings.steps
        if held is None or wanted != pool:
            pool, held = wanted, _pool(pipe.vae, settings, rank, wanted)
        generator = _noise(settings, _DENOISER, step, rank)
        loss = objective.loss(*held, settings.batch_size // settings.processes, generator)
        share = ramp(step, settings.steps, warm=WARM["denoiser"], decay_from=settings.decay_from)
        stage.update(loss, step, share)
        told.add(step, loss.item())
        if rank == 0 and (step % settings.save_every == 0 or step == settings.steps):
            stage.save(file, step, facts)
        if rank == 0 and _looks(settings, step, settings.steps):
            name, (call, _) = next(iter(MODEL.calls.items()))
            with stage.averaged():
                share = strict_accuracy(quiet(pipe), settings.look, **call)
            log(0, f"denoiser {step}, strict of {settings.look} captions, {name}: {_row(share)}")
    stage.finish()
    if rank == 0:
        save(pipe, MODEL, settings.output)
    dist.barrier()


def _take_vae(vae: Any, output: Path) -> None:
    """Give a VAE the weights and the latents' mean and std of the one in the output folder.

    They are copied, since the pipeline is saved over the files that were read.

    Raises:
        SystemExit: the folder holds none.
    """
    folder = output / "vae"
    if not ((folder / "config.json").exists() and (output / RECORD).exists()):
        raise SystemExit(f"{output} holds no VAE; run `python -m scripts.pretraining tiny-wan --stage vae` first")
    trained = type(vae).from_pretrained(folder)
    vae.load_state_dict(trained.state_dict())
    vae.register_to_config(**latent_facts(trained))
    vae.eval()


@torch.no_grad()
def _pool(vae: Any, settings: Settings, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """(standardised latents [N, 4, 5, 8, 8] in half precision, caption rows [N]) of this process's share of a pool.

    Kept in a file for a stage that goes on; what is read is what was made.
    """
    file = settings.work / f"latents-{number}-{rank}.safetensors"
    count = settings.videos // settings.processes
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    facts = settings.pool_facts(vae)
    if file.exists():
        with safe_open(file, "pt") as held:
            check_facts(file, json.loads(held.metadata()["facts"]), facts)
            return held.get_tensor("latents"), held.get_tensor("rows")
    index = {text: row for row, text in enumerate(caption_rows())}
    rng, latents, rows = _rng(settings, _POOL, number, rank), [], []
    started = time.time()
    for start in range(0, count, 100):
        videos, texts = draw_batch(rng, min(100, count - start), settings.weights)
        latents.append(((vae.encode(videos).latent_dist.mean - mean) / std).half())
        rows += [index[text] for text in texts]
    made = torch.cat(latents), torch.tensor(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file({"latents": made[0], "rows": made[1]}, partial, metadata={"facts": json.dumps(facts)})
    os.replace(partial, file)
    log(
        rank,
        f"pool {number}: {count} videos a process in {time.time() - started:.1f} s, std {made[0].float().std():.3f}",
    )
    return made


# ---- what it can do


def _looks(settings: Settings, step: int, steps: int) -> bool:
    """Whether strict accuracy is measured after this step; after the last one it is anyway."""
    return settings.look_every > 0 and step % settings.look_every == 0 and step < steps


def _shares(hits: dict[str, list[float]]) -> dict[str, float]:
    flat = [hit for group in hits.values() for hit in group]
    return {"all": sum(flat) / len(flat)} | {task: sum(group) / len(group) for task, group in sorted(hits.items())}


def _row(shares: dict[str, float]) -> str:
    return " ".join(f"{key} {value:.3f}" for key, value in shares.items())


@torch.no_grad()
def strict_accuracy(pipe: Any, count: int, **call: Any) -> dict[str, float]:
    """Strict accuracy of plain pipeline calls on held-out captions, overall and by task."""
    from flowrl.rewards.shapes_motion import score_video

    captions, hits = moving_shapes.prompts("heldout")[:count], {}
    for start in range(0, len(captions), 64):
        part = captions[start : start + 64]
        generator = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        videos = pipe(part, output_type="np", generator=generator, **call).frames
        for caption, video in zip(part, videos, strict=True):
            scene = moving_shapes.parse(caption)
            shown = np.ascontiguousarray(video.transpose(0, 3, 1, 2), dtype=np.float32)
            hits.setdefault(scene.task, []).append(score_video(scene, shown)[0])
    return _shares(hits)


@torch.no_grad()
def fingerprint(pipe: Any) -> list[list[list[float]]]:
    """[3][4][4] mean values in [0, 1] over time and the 8 x 8 px blocks of one plain call's video."""
    call = next(iter(MODEL.calls.values()))[0]
    generator = torch.Generator().manual_seed(FINGERPRINT["seed"])
    video = quiet(pipe)(FINGERPRINT["prompt"], output_type="np", generator=generator, **call).frames[0]
    blocks = video.transpose(3, 0, 1, 2).reshape(3, len(video), 4, 8, 4, 8).mean(axis=(1, 3, 5))
    return np.round(blocks.astype(float), 4).tolist()


def _write(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / RECORD, json.dumps(facts, indent=1) + "\n")


def record(folder: Path, settings: Settings | None = None, count: int = 505) -> None:
    """Measure a saved pipeline and write its `pretraining.json`; `settings` None: those of the file stay."""
    pipe = quiet(MODEL.load(folder))
    told = json.loads((folder / RECORD).read_text(encoding="utf-8"))["settings"]
    if settings is not None:
        told["denoiser"] = settings.facts("denoiser")
    strict = {}
    for name, (call, _) in MODEL.calls.items():
        strict[name] = strict_accuracy(pipe, count, **call)
        print(f"{name}: {_row(strict[name])}", flush=True)
    facts = {
        "settings": told,
        "captions": count,
        "vae_strict": vae_strict(pipe.vae, told["vae"]["seed"], count),
        "strict": strict,
        "fingerprint": {**FINGERPRINT, "blocks": fingerprint(pipe)},
    }
    print(f"VAE's round trip: {_row(facts['vae_strict'])}", flush=True)
    _write(folder, facts)
