"""The step plan: which steps are stochastic, how noisy, which are trained. The loop obeys it.

The plan alone decides the edge cases: the bound at sigma = 1 and the deterministic final step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.process import Process
from flowrl.schedules import Schedule
from flowrl.types import Step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """K denoising steps. `noise_level[k]` 0 means a deterministic step; `train` lists the trained steps."""

    schedule: Schedule
    noise_level: tuple[float, ...]
    train: tuple[int, ...]

    def __post_init__(self) -> None:
        num_steps = len(self.schedule)
        if len(self.noise_level) != num_steps:
            raise ValueError(f"the plan has {len(self.noise_level)} noise levels for {num_steps} steps")
        outside = [k for k in self.train if not 0 <= k < num_steps]
        if outside:
            raise ValueError(f"the plan trains step {outside[0]}, but there are only steps 0..{num_steps - 1}")
        for k in self.train:
            if not self.noise_level[k] > 0:
                raise ValueError(
                    f"the plan trains step {k}, which is deterministic (noise level {self.noise_level[k]:g}): "
                    "it has no log-prob"
                )
            if k == num_steps - 1 and float(self.schedule.sigmas[-1]) == 0:
                raise ValueError(f"the plan trains the last step ({k}): its Gaussian is too sharp to be scored")

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def stochastic(self) -> tuple[bool, ...]:
        return tuple(level > 0 for level in self.noise_level)

    def steps(self, index: Tensor, process: Process, device: torch.device | str = "cpu") -> Step:
        """The steps of `index` [B] as [B] tensors."""
        index = index.cpu()
        sigmas = self.schedule.sigmas
        alphas = process.alpha(sigmas)
        # Some laws diverge at the noisiest sigma; official code bounds it by the grid's second value.
        ceiling = sigmas[1 if len(sigmas) > 2 else 0].expand(len(index))
        columns = {
            "alpha": alphas[index],
            "sigma": sigmas[index],
            "alpha_next": alphas[index + 1],
            "sigma_next": sigmas[index + 1],
            "timestep": self.schedule.timesteps[index],
            "noise_level": torch.tensor(self.noise_level)[index],
            "sigma_ceiling": ceiling.clone(),
        }
        return Step(index=index.to(device), **{name: value.to(device) for name, value in columns.items()})


def deterministic(schedule: Schedule) -> StepPlan:
    """Every step an ODE step: evaluation and sampling."""
    return StepPlan(schedule=schedule, noise_level=(0.0,) * len(schedule), train=())


def window(schedule: Schedule, noise_level: float, steps: Sequence[int] | None = None) -> StepPlan:
    """Stochastic and trained at `steps`, deterministic elsewhere; None: every step but the last.

    Raises:
        ValueError: the window is empty, leaves the grid, or holds the last step; noise_level is 0.
    """
    chosen = tuple(range(len(schedule) - 1)) if steps is None else tuple(steps)
    if not chosen:
        raise ValueError(
            f"the window of stochastic steps is empty ({len(schedule)} steps in all): give at least one, "
            "and at least 2 denoising steps"
        )
    levels = tuple(noise_level if k in chosen else 0.0 for k in range(len(schedule)))
    return StepPlan(schedule=schedule, noise_level=levels, train=chosen)
