"""The training of tiny-kontext, which goes on where it was stopped, and the record of the result."""

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

from flowrl import edited_shapes, shapes
from flowrl.core.files import write_atomically
from scripts.pretraining.edit_prompts import as_image
from scripts.pretraining.kontext import MODEL, SIZE, FlowMatching, Settings, build_pipeline, draw_batch
from scripts.pretraining.report import quiet
from scripts.pretraining.stages import Stage, Told, check_facts, ramp
from scripts.pretraining.training import log, save

RECORD = "pretraining.json"
FINGERPRINT = {"prompt": "make the red circle blue", "seed": 0}
WARM = 300
_NOISE, _POOL, _CHECK = range(3)


def worker(rank: int, settings: Settings, port: int, finish: bool = False) -> None:
    """One process of the training; the first of them saves, measures and tells."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=settings.processes)
    done = train(settings, rank, finish=finish)
    if rank == 0:
        record(settings.output, settings.facts() | {"done": done})
    dist.barrier()
    dist.destroy_process_group()


def train(settings: Settings, rank: int, *, finish: bool = False) -> int:
    """Denoiser and text encoders on pools of latents; then the whole pipeline is saved. The number of steps done.

    `finish`: nothing is trained, and what the checkpoint holds is saved.
    """
    pipe = build_pipeline(settings.seed, settings.vae_from)
    denoiser, *encoders = MODEL.trained(pipe)
    groups = [([denoiser], settings.rate), (encoders, settings.text_rate * settings.rate)]
    stage = Stage(groups, average=settings.ema, processes=settings.processes)
    file, facts = settings.work / "denoiser.safetensors", settings.facts()
    done = stage.load(file, facts)
    objective, told = FlowMatching(pipe, settings), Told(rank, "denoiser", settings.steps)
    number, pool = -1, {}
    last = done if finish else settings.steps
    for step in range(done + 1, last + 1):
        wanted = (step - 1) * settings.pools // settings.steps
        if wanted != number:
            number, pool = wanted, _pool(objective, settings, rank, wanted)
        drawn = np.random.default_rng((settings.seed, _NOISE, step, rank)).integers(2**62)
        generator = torch.Generator().manual_seed(int(drawn))
        loss = objective.loss(pool, settings.batch_size // settings.processes, generator)
        stage.update(loss, step, ramp(step, settings.steps, warm=WARM, decay_from=settings.decay_from))
        told.add(step, loss.item())
        if rank == 0 and (step % settings.save_every == 0 or step == settings.steps):
            stage.save(file, step, facts)
        if rank == 0 and settings.look_every and step % settings.look_every == 0 and step < settings.steps:
            with stage.averaged():
                shares = strict_accuracy(quiet(pipe), settings.look, settings.operations, **_lab_call())
            log(0, f"denoiser {step}, {settings.look} held-out pairs: {row(shares)}")
            for module in (denoiser, *encoders):
                module.train()
    stage.finish()
    if rank == 0:
        save(pipe, MODEL, settings.output)
    dist.barrier()
    return last


def _lab_call() -> dict[str, Any]:
    return next(iter(MODEL.calls.values()))[0]


@torch.no_grad()
def _pool(objective: FlowMatching, settings: Settings, rank: int, number: int) -> dict[str, Tensor]:
    """Standardised latents of sources and results [N, 4, 8, 8] in half precision, and the instructions' token numbers.

    Kept in a file for a training that goes on; what is read is what was made.
    """
    file, facts = settings.work / f"pairs-{number}-{rank}.safetensors", settings.pool_facts()
    if file.exists():
        with safe_open(file, "pt") as held:
            check_facts(file, json.loads(held.metadata()["facts"]), facts)
            return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - no dictionary
    vae, rng = objective.pipe.vae, np.random.default_rng((settings.seed, _POOL, number, rank))
    parts: dict[str, list[Tensor]] = {name: [] for name in ("source", "result", "clip", "t5")}
    count, started = settings.pairs // settings.processes, time.time()
    for start in range(0, count, 100):
        sources, results, texts = draw_batch(rng, min(100, count - start), settings.operations)
        for name, images in (("source", sources), ("result", results)):
            mean = vae.encode(images * 2 - 1).latent_dist.mean
            parts[name].append(((mean - vae.config.shift_factor) * vae.config.scaling_factor).half())
        for name, numbers in zip(("clip", "t5"), objective.read(texts), strict=True):
            parts[name].append(numbers.to(torch.int16))
    made = {name: torch.cat(values) for name, values in parts.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(made, partial, metadata={"facts": json.dumps(facts)})
    os.replace(partial, file)
    log(rank, f"pool {number}: {count} pairs a process in {time.time() - started:.1f} s")
    return made


# ---- what it can do


def held_out(count: int, operations: tuple[str, ...]) -> list[edited_shapes.Pair]:
    """Held-out pairs, the operations in turn."""
    rng = np.random.default_rng(_CHECK)
    return [edited_shapes.draw(operations[i % len(operations)], rng, SIZE, "heldout") for i in range(count)]


@torch.no_grad()
def strict_accuracy(pipe: Any, count: int, operations: tuple[str, ...], **call: Any) -> dict[str, float]:
    """Strict accuracy of plain pipeline calls on held-out pairs, overall, by operation, and its two parts."""
    from flowrl.rewards._shapes.eye import detect_all
    from flowrl.rewards.shapes_edit import CARD, in_cells, judge

    pairs, rows = held_out(count, operations), []
    for start in range(0, count, 50):
        part = pairs[start : start + 50]
        sources = np.stack([shapes.render(pair.source, SIZE) for pair in part])
        texts = [pair.edit.instruction for pair in part]
        generator = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        if "negative_prompt" in call:
            call = call | {"negative_prompt": [""] * len(part)}
        images = [as_image(source) for source in sources]
        results = pipe(images, texts, output_type="np", generator=generator, **call).images.transpose(0, 3, 1, 2)
        seen = (
            [in_cells(found, SIZE, SIZE) for found in detect_all(values)]
            for values in (sources, np.ascontiguousarray(results, dtype=np.float32))
        )
        rows += [judge(pair.edit, *both).row for pair, *both in zip(part, *seen, strict=True)]
    table = np.asarray(rows)
    means = {name.removeprefix("edit_"): value for name, value in zip(CARD.outputs, table.mean(axis=0), strict=True)}
    means |= {name: table[i :: len(operations), 0].mean() for i, name in enumerate(operations[:count])}
    return {name: round(float(value), 4) for name, value in means.items()}


def row(shares: dict[str, float]) -> str:
    """The shares in a line."""
    return " ".join(f"{key} {value:.3f}" for key, value in shares.items())


@torch.no_grad()
def fingerprint(pipe: Any) -> list[list[list[float]]]:
    """[3][4][4] mean values in [0, 1] of the 8 x 8 px blocks of one plain call's image."""
    generator = torch.Generator().manual_seed(FINGERPRINT["seed"])
    source = shapes.render([shapes.Placed("circle", "red", 10, 10, 5), shapes.Placed("cross", "green", 22, 22, 5)])
    image = quiet(pipe)(as_image(source), FINGERPRINT["prompt"], output_type="np", generator=generator, **_lab_call())
    blocks = image.images[0].transpose(2, 0, 1).reshape(3, 4, 8, 4, 8).mean(axis=(2, 4))
    return np.round(blocks.astype(float), 4).tolist()


def record(folder: Path, settings: dict[str, Any] | None = None, count: int = 500) -> None:
    """Measure a saved pipeline and write its `pretraining.json`; `settings` None: those of the file stay."""
    file, pipe = folder / RECORD, quiet(MODEL.load(folder))
    kept = json.loads(file.read_text(encoding="utf-8"))["settings"] if settings is None else settings
    strict = {}
    for name, (call, _) in MODEL.calls.items():
        strict[name] = strict_accuracy(pipe, count, tuple(kept["operations"]), **call)
        print(f"{name}: {row(strict[name])}", flush=True)
    facts = {
        "settings": kept,
        "pairs": count,
        "strict": strict,
        "fingerprint": {**FINGERPRINT, "blocks": fingerprint(pipe)},
    }
    write_atomically(file, json.dumps(facts, indent=1) + "\n")
