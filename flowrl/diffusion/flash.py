"""MixGRPO-Flash: a grid that is shortened after the window of stochastic steps.

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO:fastvideo/utils/sampling_utils.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule, shift_sigmas
from flowrl.diffusion.solvers import SolverName


def flash_schedule(schedule: Schedule, last: int, ratio: float, shift: float) -> Schedule:
    """A full flow grid up to step `last` (e), then n nodes from sigma_{e+1} to 0 instead of S - e: e + n steps.

    The nodes are even before the shift, as in `shifted_linspace`; n = int((S - e) * ratio), at least 2. The released
    code allows n = 1, whose only node is sigma_{e+1}: the image would stay noisy. The S steps of `schedule` end at
    sigma 0; `last` keeps its place, the window's end; `ratio`, in (0, 1], is the share of the nodes after it that are
    kept; `shift` is the resolution shift of the grid.

    Raises ValueError: no step is left after `last`, the grid does not end at 0, has another shift, or timesteps other
    than 1000 sigma.
    """
    num_steps, sigmas = len(schedule), schedule.sigmas
    if not 0 <= last <= num_steps - 2:
        raise ValueError(f"the window ends at step {last}: of {num_steps} steps it must end in 0..{num_steps - 2}")
    if not 0 < ratio <= 1:
        raise ValueError(f"the share of kept steps is {ratio:g}; it must be in (0, 1]")
    if schedule.table is not None:
        raise ValueError(
            "only a flow grid can be shortened after the window, and this model predicts noise (VP); use mix_grpo, "
            "which keeps the whole grid"
        )
    if float(sigmas[-1]) != 0 or float(sigmas[0]) > 1:
        raise ValueError(f"only a flow grid in [0, 1] can be shortened; this one ends at sigma {float(sigmas[-1]):g}")
    if not torch.allclose(1000 * sigmas[:-1], schedule.timesteps, rtol=1e-4):
        raise ValueError("this model's timesteps are not 1000 sigma, so its grid cannot be shortened; use mix_grpo")
    _require_shift(sigmas[:-1].double(), shift)
    nodes = max(int((num_steps - last) * ratio), 2)
    even = torch.linspace(float(shift_sigmas(sigmas[last + 1].double(), 1 / shift)), 0, nodes, dtype=torch.float64)
    # The first node is taken over, not computed: steps up to `last` stay bitwise those of the full grid.
    tail = shift_sigmas(even, shift).float()[1:]
    return Schedule(
        sigmas=torch.cat([sigmas[: last + 2], tail]),
        timesteps=torch.cat([schedule.timesteps[: last + 2], 1000 * tail[:-1]]),
    )


def _require_shift(sigmas: Tensor, shift: float) -> None:
    """Raise unless the nodes [S] of a grid are even before that shift: after the window it would go on as another."""
    if len(sigmas) < 3:
        return

    def unevenness(value: float) -> float:
        gaps = shift_sigmas(sigmas, 1 / value).diff().abs()
        return float(gaps.max() / gaps.min().clamp(min=1e-12)) - 1

    if unevenness(shift) > 0.05:
        own = min((round(1 + 0.05 * k, 2) for k in range(281)), key=unevenness)
        hint = f"it is about {own:g}" if unevenness(own) <= 0.05 else "no shift makes this grid even"
        raise ValueError(f"shift={shift:g} is not the resolution shift of the model's own grid; {hint}")


def flash(
    schedule: Schedule,
    noise_level: float,
    steps: Sequence[int],
    *,
    ratio: float,
    shift: float,
    solver: SolverName = "dpm2_midpoint",
) -> StepPlan:
    """`window` on a grid shortened after it by `flash_schedule`, where `solver` takes the steps."""
    full = window(schedule, noise_level, steps)
    last = max(full.train)
    short = flash_schedule(schedule, last, ratio, shift)
    return replace(
        full,
        schedule=short,
        noise_level=full.noise_level[: last + 1] + (0.0,) * (len(short) - last - 1),
        solver=tuple("ode" if k <= last else solver for k in range(len(short))),
    )
