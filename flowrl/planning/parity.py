"""Parity of a pipeline's own call and the adapter around it: for `flowrl doctor --model`, and before a training."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import euler_mean
from flowrl.display.display import working
from flowrl.models.base import LoraSettings, ModelAdapter, opaque
from flowrl.models.generic import own_call
from flowrl.models.generic.adapter import Generic
from flowrl.models.generic.images import ANY
from flowrl.models.generic.own_call import PROMPTS, encoded, first_noise
from flowrl.models.weights.roles import Weights
from flowrl.training.world import World

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
    if model.distilled is not None:
        yield "distilled", f"{model.distilled}; x0_hat is a sample, so no losses on re-noised samples"
    yield "networks", ", ".join(f"{name} ({type(part).__name__})" for name, part in model.networks.items())
    yield "network's timestep", f"{slope:g} t + {offset:g} for the scheduler's t"
    mixed = "may share a forward" if model.batch_key(1) == 0 else "are predicted step by step"
    yield "samples at different timesteps", "are predicted one by one" if model.family.singly else mixed
    yield "image", f"{model.height} x {model.width}, sides in multiples of {model.size.unit}"
    held = "; the pipeline's other latents are those of the image" if model.images.holds else ""
    yield "latents", "x".join(str(n) for n in model.latent_shape()) + held
    rows = encoded(model, PROMPTS[:1]).tensors
    yield "embedding of a prompt", _shapes(rows[name] for name in rows if not name.startswith("images."))
    least, most = model.image_limits
    if most:
        several = f"{least} or more" if most == ANY else f"{least} to {most}"
        yield "images with a prompt", str(least) if least == most else several
    if least:
        own = [rows[name] for name in rows if name.startswith("images.")]
        yield "kept of them", _shapes(own)
    yield f"sigmas of {STEPS} steps", ", ".join(f"{s:.4g}" for s in model.schedule(STEPS).sigmas.tolist())
    yield "LoRA targets", ", ".join(model.lora_targets) or "none: give model.lora.targets"


def checks(model: Generic, guidance_scale: float) -> Iterator[tuple[str, float]]:
    """(name, relative difference) of each comparison; NaN where it does not apply."""
    cond = encoded(model, PROMPTS)
    x = first_noise(model, 2)
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
    yield "two predictions against the pipeline's own call", own_call.compare(model, guidance_scale).relative
    own = own_call.own_call(model, x[:1], guidance_scale, STEPS, "pt")
    latents = model.images.stepped(own.steps[-1].left, model.latent_shape()).float()
    mine = euler(model, x[:1], guidance_scale)
    single = type(model.pipeline.scheduler).__name__ in ("FlowMatchEulerDiscreteScheduler", "DDIMScheduler")
    if single or "CogVideoXDDIM" in type(model.pipeline.scheduler).__name__:
        yield f"{STEPS} steps against the pipeline's own call", _difference(mine, latents)
    mine = model.decode(latents, cond.index(torch.tensor([0])))
    yield "decoding against the pipeline's own", _difference(mine, opaque(own.output[0].float()))


def untrained(model: Generic, guidance_scale: float) -> tuple[int, list[str]]:
    """(number of adapted modules, names of those whose LoRA gets no gradient unless the family declares them dead)."""
    weights = Weights(model.network, LoraSettings(rank=1, alpha=1), model.lora_targets, seed=0)
    cond = encoded(model, PROMPTS[:1])
    x = first_noise(model)
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


def require_own_call(adapter: ModelAdapter, scales: Iterable[float], world: World) -> None:
    """Refuse a pipeline that re-entry does not predict as its own call does; the processes agree on it.

    A class that flowrl's tests compare passes, and so does one that passed before (`own_call.question`). It needs the
    text encoders; `scales` are the guidance scales of the recipe.

    Raises ModelError: with the two numbers, on all processes.
    """
    if not isinstance(adapter, Generic) or own_call.known(adapter):
        return
    for scale in {adapter.branches(scale): scale for scale in scales}.values():
        asked = own_call.question(adapter, scale)
        had = own_call.passed(asked)
        if not world.any(not had):
            continue
        with working(f"comparing two steps with {adapter.kind}'s own call"):
            refused = own_call.refusal(adapter, scale)
        text = next((each for each in world.gather(refused) if each is not None), None)
        if text is not None:
            raise world.sharing(ModelError(text))
        if not had:
            own_call.keep(asked)


def _shapes(entries: Iterable[Tensor | list[Tensor]]) -> str:
    """Shapes of the first row of each entry, without those of single numbers."""
    shapes = [tuple(entry[0].shape) for entry in entries]
    return ", ".join("x".join(map(str, shape)) for shape in shapes if shape)


def _difference(a: Tensor, b: Tensor) -> float:
    return own_call.Difference.of(a, b).relative
