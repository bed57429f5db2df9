"""Grids of variance-preserving models: the table alphas_cumprod [N] of their training, and the timesteps K of a grid.

    betas     linear           linspace(start, end, N)
              scaled_linear    linspace(sqrt(start), sqrt(end), N)^2              SD, SDXL
              squaredcos_cap_v2  min(1 - f(i + 1) / f(i), 0.999), f(i) = cos^2((i / N + 0.008) / 1.008 * pi / 2)
    spacing   leading          (K - 1 .. 0) * (N // K) + offset                   SD, SDXL
              trailing         round(N - k N / K) - 1, so it starts at N - 1      zero terminal SNR, Turbo
              linspace         round(linspace(N - 1, 0, K))
              lcm              floor(k M / K)-th of M timesteps, from the noisy end; M those of the distillation

Every step ends where the next one starts; the last at the table's entry N // K below, or where that is below 0 at the
model's own end, 1 or the table's first entry. diffusers' DDIM takes N // K below for every step, which is another
chain where the grid is not even (linspace; trailing with N / K broken). Where its arange rounds past its end, for 62 of
K = 1..1000 with N = 1000 (61, 103, 121, ...), its trailing grids have K + 1 timesteps, the last -1; here they have K.

float64 inside. Source: diffusers' DDIMScheduler and LCMScheduler; arXiv 2305.08891 (terminal SNR 0, spacing).
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.diffusion.schedules import Schedule

Betas = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Spacing = Literal["leading", "trailing", "linspace", "lcm"]


def betas(kind: Betas, start: float, end: float, count: int = 1000) -> Tensor:
    """Noise added at each training step, [N] float64; squaredcos_cap_v2 takes no `start` and `end`."""
    if kind == "linear":
        return torch.linspace(start, end, count, dtype=torch.float64)
    if kind == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64).square()
    if kind == "squaredcos_cap_v2":
        bar = ((torch.arange(count + 1, dtype=torch.float64) / count + 0.008) / 1.008 * math.pi / 2).cos().square()
        return (1 - bar[1:] / bar[:-1]).clamp(max=0.999)
    raise ValueError(f"beta_schedule={kind!r} is unknown; there are: {', '.join(get_args(Betas))}")


def alphas_cumprod(betas: Tensor, *, zero_snr: bool = False) -> Tensor:
    """Squared signal coefficient of each training step, [N] float64, falling.

    `zero_snr` shifts and scales its root so that the last is 0 and the first stays (rescale_betas_zero_snr).

    >>> alphas_cumprod(torch.tensor([0.19, 0.75], dtype=torch.float64)).tolist()
    [0.81, 0.2025]
    """
    table = (1 - betas.double()).cumprod(0)
    if not zero_snr:
        return table
    root = table.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


def spaced(
    num_steps: int, spacing: Spacing, *, steps_offset: int = 0, count: int = 1000, distilled: int = 50
) -> Tensor:
    """Timesteps of a grid, [K] int64, falling; `distilled` is the M of `lcm`.

    Raises ValueError: more steps than there are timesteps, or a timestep past the last one.

    >>> spaced(4, "leading", steps_offset=1).tolist(), spaced(4, "trailing").tolist(), spaced(4, "lcm").tolist()
    ([751, 501, 251, 1], [999, 749, 499, 249], [999, 759, 499, 259])
    """
    most = distilled if spacing == "lcm" else count
    if not 1 <= num_steps <= most:
        raise ValueError(f"{num_steps} steps: this model has {most} timesteps, so 1..{most} can be taken")
    k = torch.arange(num_steps, dtype=torch.float64)
    if spacing == "leading":
        steps = (num_steps - 1 - k) * (count // num_steps) + steps_offset
    elif spacing == "trailing":
        # Its rounding decides ties: numpy's arange takes the difference of its first two values as the step.
        step = (count - count / num_steps) - count
        steps = (count + k * step).round() - 1
    elif spacing == "linspace":
        steps = (k * ((count - 1) / max(num_steps - 1, 1))).round().flip(0)
    elif spacing == "lcm":
        steps = (most - (k * (most / num_steps)).floor()) * (count // most) - 1
    else:
        raise ValueError(f"timestep_spacing={spacing!r} is unknown; there are: {', '.join(get_args(Spacing))}")
    if float(steps[0]) > count - 1:
        raise ValueError(
            f"{num_steps} steps with spacing {spacing!r} and steps_offset={steps_offset} start at timestep "
            f"{float(steps[0]):g}, past the last one, {count - 1}; take fewer steps"
        )
    return steps.long()


def level_at(table: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) at timesteps [B], float32: the table's, and between two of them by a linear log-SNR."""
    place = timestep.detach().double().cpu().clamp(0, len(table) - 1)
    below = place.floor().long()
    nodes = (1 / table - 1).log()
    between = torch.lerp(nodes[below], nodes[(below + 1).clamp(max=len(table) - 1)], place - below)
    square = torch.where(place == below, table[below], torch.sigmoid(-between))
    return square.sqrt().float().to(timestep.device), (1 - square).sqrt().float().to(timestep.device)


def last_end(table: Tensor, timesteps: Tensor, own: float | None) -> float:
    """alphas_cumprod where the last step of a grid [K] ends, by DDIM: N // K below its timestep.

    `own` is the model's where there is no timestep so low; None takes the table's first entry, which leaves noise in
    the step: DDPO's clamp t' = max(t - N // K, 0).

    >>> table = torch.tensor([0.9, 0.8, 0.5, 0.1])
    >>> [round(last_end(table, torch.tensor([2, 1]), own), 1) for own in (1.0, None)]
    [1.0, 0.9]
    """
    below = int(timesteps[-1]) - len(table) // len(timesteps)
    return float(table[max(below, 0)]) if own is None or below >= 0 else own


def vp_schedule(table: Tensor, timesteps: Tensor, end: float) -> Schedule:
    """The grid of a VP model: timesteps [K] are whole numbers, falling; `end` is alphas_cumprod after the last.

    Raises ValueError: the last step would not move.
    """
    table, timesteps = table.detach().double().cpu(), timesteps.long().cpu()
    nodes = torch.cat([table[timesteps], torch.tensor([end], dtype=torch.float64)])
    if not nodes[-1] > nodes[-2]:
        raise ValueError(
            f"the last step would not move: it starts at timestep {int(timesteps[-1])} and ends at the table's first "
            "entry (set_alpha_to_one=false, or final_alpha=first); a grid of spacing 'leading' with an offset, or "
            "'trailing', starts it above"
        )
    return Schedule(
        sigmas=(1 - nodes).sqrt().float(), timesteps=timesteps.float(), alphas=nodes.sqrt().float(), table=table
    )
