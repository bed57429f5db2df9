"""The grids on which samplers and methods are tried: those of SD3 and its kin, of DanceGRPO, and of SD1.x."""

import torch
from torch import Tensor

from flowrl.diffusion.schedules import Schedule, flow_match_euler
from flowrl.diffusion.vp_schedules import spaced
from flowrl.diffusion.vp_schedules import vp_schedule as vp_grid


def flow_schedule(num_steps: int, shift: float = 3.0) -> Schedule:
    """The grid of a flow model with a static shift."""
    sigmas = flow_match_euler(num_steps, shift)
    return Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


def vp_alphas_cumprod() -> Tensor:
    """The table of SD1.x, [1000] float64: beta = linspace(sqrt(0.00085), sqrt(0.012), 1000)^2."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    return (1 - betas).cumprod(0)


def vp_schedule(num_steps: int) -> Schedule:
    """The grid of SD1.x: leading spacing, offset 1; the last step ends at training step 0, not at clean data."""
    table, timesteps = vp_alphas_cumprod(), spaced(num_steps, "leading", steps_offset=1)
    return vp_grid(table, timesteps, float(table[0]))
