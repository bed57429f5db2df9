"""What an adapter owes its pipeline: the parity law of DESIGN section 4, over every tiny pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.models.generic import Config, Generic
from flowrl.plan import deterministic
from flowrl.rollout import Noise, Policy, run
from flowrl.samplers.ode import Ode
from flowrl.types import SampleId
from tests import tiny_pipelines as tiny

EVERY = [pytest.param(name, marks=() if case.fast else pytest.mark.slow) for name, case in tiny.CASES.items()]
GUIDED = 3.0


def adapter(name: str, size: tuple[int, int] | None = None, **options: Any) -> Generic:
    """The generic adapter around a fresh tiny pipeline."""
    height, width = size or tiny.CASES[name].sizes[0]
    config = Config(path="tiny", height=height, width=width, call=tiny.CASES[name].call, **options)
    return Generic(tiny.make(name), config)


def drawn(model: Generic, batch: int, guidance_scale: float, steps: int) -> tuple[Tensor, Tensor]:
    """(starting noise, clean latents) of the adapter under the plain Euler plan."""
    ids = [SampleId(slot, 0) for slot in range(batch)]
    noise = Noise(0, "parity", None, model.latent_shape())
    cond = model.encode(tiny.PROMPTS[:batch])
    policy, plan = Policy(model, Ode(), guidance_scale), deterministic(model.schedule(steps))
    samples, _ = run(policy, plan, noise, ids, cond, torch.arange(batch), batch_size=batch)
    return noise.initial(ids), samples.x0


def own_call(
    pipe: Any, name: str, size: tuple[int, int], noise: Tensor, batch: int, guidance_scale: float, steps: int
) -> tuple[Tensor, Tensor]:
    """(latents that leave the loop, pictures) of the pipeline's own call from the same noise."""
    left: list[Tensor] = []
    step, prepare = pipe.scheduler.step, pipe.prepare_latents

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        left.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    def preparing(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        return (noise, *found[1:]) if isinstance(found, tuple) else noise

    call = dict(tiny.CASES[name].call)
    if name == "hunyuan_video_1_5":
        pipe.guider.guidance_scale = guidance_scale
    else:
        call["true_cfg_scale" if name == "qwen_image" else "guidance_scale"] = guidance_scale
    if name == "qwen_image" and guidance_scale > 1:
        call["negative_prompt"] = [""] * batch
    if "negative_prompt" in call and isinstance(call["negative_prompt"], str):
        call["negative_prompt"] = [call["negative_prompt"]] * batch
    if name in ("sana", "sana_video", "pixart_sigma"):
        call["use_resolution_binning"] = False
    pipe.scheduler.step, pipe.prepare_latents = stepping, preparing
    try:
        pictures = pipe(
            prompt=tiny.PROMPTS[:batch],
            height=size[0],
            width=size[1],
            num_inference_steps=steps,
            output_type="pt",
            return_dict=False,
            **call,
        )[0]
    finally:
        del pipe.scheduler.step, pipe.prepare_latents
    return left[-1], pictures
