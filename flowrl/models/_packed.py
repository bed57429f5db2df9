"""What the families with packed latents share: 2 x 2 latent pixels are one token, [B, tokens, 4 C], row by row."""

from __future__ import annotations

from typing import Any

import torch

from flowrl.core.errors import ModelError
from flowrl.diffusion.schedules import Schedule, shifted_linspace


def with_shift(scheduler: Any, shift: float | None) -> Any:
    """A scheduler that makes of the pipeline's even sigmas what `grid_schedule` makes with `shift`."""
    if shift is None:
        return scheduler
    return type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift=shift, shift_terminal=None)


def grid_schedule(scheduler: Any, num_inference_steps: int, tokens: int, shift: float | None) -> Schedule:
    """linspace(1, 1 / K, K), shifted; timesteps are 1000 sigma.

    Args:
        scheduler: the pipeline's; a copy of it is asked.
        num_inference_steps: K.
        tokens: of the picture; the scheduler's mu is linear in them.
        shift: null takes what the pipeline does; a number replaces its shift and what else it does to the grid, as
            DanceGRPO and MixGRPO publish it.

    Raises:
        ModelError: the scheduler is no plain grid of flow steps.
    """
    if shift is not None:
        sigmas = shifted_linspace(num_inference_steps, shift)
        return Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1])
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ModelError(
            f"{type(scheduler).__name__} is not the family's FlowMatchEulerDiscreteScheduler; set model.shift to a "
            "number to do without the pipeline's grid, or use model.name=generic"
        )
    own, values = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config), scheduler.config
    mu = calculate_shift(
        tokens,
        values.get("base_image_seq_len", 256),
        values.get("max_image_seq_len", 4096),
        values.get("base_shift", 0.5),
        values.get("max_shift", 1.15),
    )
    even = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps, dtype=torch.float64).tolist()
    own.set_timesteps(num_inference_steps, sigmas=even, mu=mu)
    return Schedule(sigmas=own.sigmas.float().cpu(), timesteps=own.timesteps.float().cpu())
