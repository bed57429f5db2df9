"""Parity of a pipeline's own call and the adapter around it, in short, for `flowrl doctor --model`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.rng import normal
from flowrl.core.types import Condition
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import euler_mean
from flowrl.models.base import LoraSettings
from flowrl.models.generic.adapter import Generic
from flowrl.models.generic.images import ANY, blank
from flowrl.models.generic.reentry import Prepared
from flowrl.models.weights import Weights

PROMPTS = ("a red circle", "two blue squares on the left of a green triangle")
STEPS = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Largest accepted difference, in units of the largest value."""


def facts(model: Generic) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that was read from the pipeline or learned by probing."""
    scheduler, (slope, offset) = model.pipeline.scheduler, model.time_map()
    yield "class", model.kind
    yield "process", f"{type(model.process).__name__}, predicts {model.prediction_type} ({type(scheduler).__name__})"
    yield (
        "guidance",
        {"cfg": "guidance_scale (CFG)", "true_cfg": "true_cfg_scale with a negative prompt"}.get(
            model.guidance, model.guidance
        ),
    )
    if model.distilled:
        yield "distilled", f"{model.distilled}; few steps, x0_hat is a sample, so no losses on re-noised samples"
    yield "networks", ", ".join(f"{name} ({type(part).__name__})" for name, part in model.networks.items())
    yield "network's timestep", f"{slope:g} t + {offset:g} for the scheduler's t"
    mixed = "may share a forward" if model.batch_key(1) == 0 else "are predicted step by step"
    yield "samples at different timesteps", "are predicted one by one" if model.family.singly else mixed
    yield "image", f"{model.height} x {model.width}, sides in multiples of {model.size.unit}"
    held = "; the pipeline's other latents are those of the image" if model.images.holds else ""
    yield "latents", "x".join(str(n) for n in model.latent_shape()) + held
    rows = encoded(model, PROMPTS[:1]).tensors
    yield "embedding of a prompt", _shapes(rows[name] for name in rows if not name.startswith("pictures."))
    least, most = model.image_limits
    if most:
        several = f"{least} or more" if most == ANY else f"{least} to {most}"
        yield "images with a prompt", str(least) if least == most else several
    if least:
        own = [rows[name] for name in rows if name.startswith("pictures.")]
        yield "kept of them", _shapes(own)
    yield f"sigmas of {STEPS} steps", ", ".join(f"{s:.4g}" for s in model.schedule(STEPS).sigmas.tolist())
    yield "LoRA targets", ", ".join(model.lora_targets) or "none: give model.lora.targets"


def checks(model: Generic, guidance_scale: float) -> Iterator[tuple[str, float]]:
    """(name, relative difference) of each comparison; NaN where it does not apply."""
    cond = encoded(model, PROMPTS)
    x = normal(model.latent_shape(), 0, "doctor", [(0,), (1,)]).to(model.device)
    steps = model.schedule(STEPS).timesteps.to(model.device)
    with torch.no_grad():
        first = model.predict(x, steps[1].repeat(2), cond, guidance_scale)
    again = model.predict(x, steps[1].repeat(2), cond, guidance_scale).detach()
    yield "a replay with gradients against the rollout", _difference(again, first)
    with torch.no_grad():
        together = model.predict(x, steps[[1, 2]], cond, guidance_scale)
        rows = [torch.tensor([k]) for k in (0, 1)]
        alone = [model.predict(x[k], steps[1 + k], cond.index(k), guidance_scale) for k in rows]
    yield "two timesteps in one batch against one by one", _difference(together, torch.cat(alone))
    latents, images = own_call(model, x[:1], guidance_scale)
    mine = euler(model, x[:1], guidance_scale)
    single = type(model.pipeline.scheduler).__name__ in ("FlowMatchEulerDiscreteScheduler", "DDIMScheduler")
    if single or "CogVideoXDDIM" in type(model.pipeline.scheduler).__name__:
        yield f"{STEPS} steps against the pipeline's own call", _difference(mine, latents)
    mine = model.decode(latents, cond.index(torch.tensor([0])))
    yield "decoding against the pipeline's own", _difference(mine, images)


def untrained(model: Generic, guidance_scale: float) -> tuple[int, list[str]]:
    """(number of adapted modules, names of those whose LoRA gets no gradient unless the family declares them dead)."""
    weights = Weights(model.network, LoraSettings(rank=1, alpha=1), model.lora_targets, seed=0)
    cond = encoded(model, PROMPTS[:1])
    x = normal(model.latent_shape(), 0, "doctor", [(0,)]).to(model.device)
    for timestep in model.schedule(STEPS).timesteps[1:].to(model.device):
        model.predict(x, timestep[None], cond, guidance_scale).float().square().mean().backward()
    ends = {name.partition(".lora_")[0]: p.grad for name, p in weights.parameters.items() if ".lora_B." in name}
    still = [name for name, grad in ends.items() if grad is None or not bool(grad.any())]
    return len(ends), sorted(set(still) - set(model.dead_lora_modules()))


def euler(model: Generic, x: Tensor, guidance_scale: float) -> Tensor:
    """Clean latents of the deterministic plan from noise x [1, ...]."""
    cond, grid = encoded(model, PROMPTS[:1]), model.schedule(STEPS)
    with torch.no_grad():
        for k in range(len(grid)):
            step = solver_plan(grid).steps(torch.tensor([k]), model.process, model.device)
            raw = model.predict(x, step.timestep, cond, guidance_scale)
            prediction = model.process.predict(raw, x, step.sigma, model.prediction_type, step.alpha)
            x = euler_mean(model.process, prediction, step)
    return x


def own_call(model: Generic, x: Tensor, guidance_scale: float) -> tuple[Tensor, Tensor]:
    """(clean latents, images) of the pipeline's own call from noise x [1, ...]."""
    pipe, left = model.pipeline, []
    step, prepare = pipe.scheduler.step, pipe.prepare_latents

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        left.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    def preparing(*args: Any, **kwargs: Any) -> Any:
        own = Prepared.of(prepare(*args, **kwargs))
        return replace(own, free=model.images.free).around(x, keep_dtype=False)

    options = model.call.arguments(1, guidance_scale, list(PROMPTS[:1]), STEPS, "pt")
    options |= model.images.arguments(images_of(model, 0), 1)
    pipe.scheduler.__dict__["step"], pipe.__dict__["prepare_latents"] = stepping, preparing
    try:
        images = pipe(**options)[0]
    finally:
        del pipe.scheduler.__dict__["step"], pipe.__dict__["prepare_latents"]
    return model.images.stepped(left[-1], model.latent_shape()).float(), images.float()


def encoded(model: Generic, prompts: Sequence[str]) -> Condition:
    """Conditions of prompts, with images if the pipeline needs them."""
    images = [images_of(model, number) for number in range(len(prompts))]
    return model.encode(prompts, images if images[0] else None)


def images_of(model: Generic, number: int) -> list[Any]:
    """Images of one colour, another for each prompt."""
    least, _ = model.image_limits
    return [blank((model.width, model.height), 40 + 80 * number)] * least


def _shapes(entries: Iterable[Tensor | list[Tensor]]) -> str:
    """Shapes of the first row of each entry, without those of single numbers."""
    shapes = [tuple(entry[0].shape) for entry in entries]
    return ", ".join("x".join(map(str, shape)) for shape in shapes if shape)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6))
