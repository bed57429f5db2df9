"""What tiny-sd3-student can do beside its teacher, and how much noise at its nodes it bears; its `pretraining.json`.

Every row draws all held-out captions with the same initial noise, by flowrl's own loop. `strict` is the share that the
verifier passes, `sharpness` that of flowrl's evaluations, `edges` the share of neighbouring pixels that differ by more
than a tenth in some channel, which blur lowers more.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from flowrl.rewards.shapes import detect, score_scene

from flowrl import shapes
from flowrl.core import registry
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan, solver_plan, window
from flowrl.evaluation.sharpness import sharpness
from flowrl.media.eight_bits import eight_bit
from flowrl.models.base import decoded
from flowrl.rollout.library import Model
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.base import Sampler
from flowrl.statistics.intervals import interval
from scripts.pretraining.report import strict_accuracy
from scripts.pretraining.sd3 import MODEL
from scripts.pretraining.student import NODES, Settings, grid, load

SEEDS = 2
MEASURES = ("strict", "sharpness", "edges")
LEVELS = {"flow_sde": (0.3, 0.5, 0.7, 0.9), "cps": (0.3, 0.5, 0.7, 0.9), "dance_sde": (0.3, 0.6, 0.9)}


def figures(
    model: Model, plan: StepPlan, guidance: float = 1.0, sampler: Sampler | None = None, *, seeds: int = SEEDS
) -> dict[str, Any]:
    """Means over the held-out captions, with 95 % intervals over captions."""
    captions, size = shapes.prompts("heldout"), 64
    ids = [SampleId(slot, seed) for slot in range(len(captions)) for seed in range(seeds)]
    rows, cond = torch.tensor([i.slot for i in ids]), model.condition(captions)
    policy = Policy(model.adapter, sampler or registry.load("samplers", "ode").build(), guidance)
    noise = Noise(0, "heldout", None, model.latent_shape)
    samples, _ = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=size)
    found = []
    for latents, part in zip(samples.x0.split(size), rows.split(size), strict=True):
        with torch.no_grad():
            images = decoded(model.adapter, latents, cond, part).numpy()
        found += [_looks(captions[slot], image) for slot, image in zip(part.tolist(), images, strict=True)]
    table = np.asarray(found).reshape(len(captions), seeds, 3).mean(axis=1)
    return {name: _rounded(interval(values)) for name, values in zip(MEASURES, table.T, strict=True)}


def _looks(caption: str, image: np.ndarray) -> tuple[float, float, float]:
    strict = score_scene(shapes.parse(caption), detect(image))[0]
    edges = [(np.abs(np.diff(image, axis=axis)).max(axis=0) > 0.1).mean() for axis in (1, 2)]
    return float(strict), sharpness(eight_bit(torch.from_numpy(image)).numpy()), float(np.mean(edges))


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items() if name != "n"}


def record(settings: Settings, *, anew: bool = True) -> None:
    """Measure the saved student and its teacher and write `pretraining.json`; not `anew`: its settings stay."""
    file = settings.output / "pretraining.json"
    kept = settings.facts() if anew else json.loads(file.read_text(encoding="utf-8"))["settings"]
    base, student = load(settings.teacher), load(settings.output)
    own, fine = student.adapter.schedule(len(NODES)), grid(len(NODES) * settings.substeps)
    guidance = settings.guidance_scale
    rows = {
        "base, 4 steps": (base, solver_plan(base.adapter.schedule(4)), 1.0),
        "base, 28 steps": (base, solver_plan(base.adapter.schedule(28)), 1.0),
        f"teacher, {len(fine)} steps, CFG {guidance:g}": (base, solver_plan(fine), guidance),
        f"student, {len(own)} steps": (student, solver_plan(own), 1.0),
    }
    facts: dict[str, Any] = {"settings": kept, "captions": len(shapes.prompts("heldout")), "seeds": SEEDS}
    facts["rows"] = {name: _told(name, figures(*row)) for name, row in rows.items()}
    facts["noise"] = {
        name: {str(level): _told(f"{name} {level}", noisy(student, name, level)) for level in levels}
        for name, levels in LEVELS.items()
    }
    pipe = MODEL.load(settings.output)
    pipe.set_progress_bar_config(disable=True)
    plain = strict_accuracy(pipe, 512, num_inference_steps=len(NODES), guidance_scale=1.0)
    facts["plain pipe(prompt)"] = _told("plain pipe(prompt)", plain)
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def noisy(student: Model, name: str, level: float) -> dict[str, Any]:
    """`figures` of a rollout with a sampler's noise on all steps but the last."""
    sampler = registry.load("samplers", name).build(None)
    return figures(student, window(student.adapter.schedule(len(NODES)), level), 1.0, sampler)


def _told(name: str, values: dict[str, Any]) -> dict[str, Any]:
    print(name, json.dumps(values), flush=True)
    return values
