"""Flow-GRPO-Fast: Flow-GRPO on a short window of steps that is drawn anew in every iteration.

    1. draw a start in [low, high - w]; steps start .. start + w - 1 are stochastic and trained, all others ODE
    2. advantages and loss as Flow-GRPO, with a clip range of at most 1e-5

The window is keyed by (seed, iteration) and the same on every process, so all samples of a group share it. CPS is
the published partner of this method; its ratio is that of its own unscaled log-prob.

With `branch` its first version: so many samples share noise and ODE up to the window's start and part there. (Released:
9 samples, a window of 1 or 2 steps from a start in 0..T // 2; there each bundle draws its own start.)

Source: yifan123/flow_grpo:scripts/train_sd3_fast.py (branching until 2025-10-13), config/grpo.py.
"""

from dataclasses import dataclass, replace

from flowrl.algorithms._options import RatioOptions, SpatialOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.core.errors import OptionError
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import splits
from flowrl.diffusion.windows import random_window
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"
# README of the official code: in a short window larger ranges crash, whatever the sampler.
_LARGEST_PRESET = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config(SpatialOptions, ClipOptions, RatioOptions):
    window_size: int = 3
    """Steps in the window (w); 0: all steps but the last, in every iteration."""
    low: int = 0
    """First step that may be in the window."""
    high: int | None = None
    """First step that may not; null: half of the steps, or as many as the window needs."""
    branch: int | None = None
    """Samples that share the path to the window, a divisor of `rollout.group_size`; null: none do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_size < 0 or self.low < 0:
            raise ValueError(f"window_size={self.window_size} and low={self.low} must not be negative")
        if self.high is not None and self.high < self.low + self.window_size:
            raise ValueError(
                f"a window of window_size={self.window_size} steps does not fit between low={self.low} "
                f"and high={self.high} (exclusive)"
            )
        if self.branch is not None and self.branch < 2:
            raise ValueError(f"branch={self.branch} must be at least 2, or null")
        for key, value in (("advantages.select", self.advantages.select), ("spatial", self.spatial)):
            if self.branch is not None and value is not None:
                raise OptionError(
                    f"branch={self.branch} with {key}: an edge of a tree belongs to several samples",
                    [{"branch": None}, {key: None}],
                )

    def clip(self, sampler: Sampler) -> tuple[float, float]:
        low, high = super().clip(sampler)
        return (low, high) if self.clip_range is not None else (min(low, _LARGEST_PRESET), min(high, _LARGEST_PRESET))

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        self.window(num_steps, 1, 0)

    def leaves(self, num_steps: int) -> int:
        return self.branch or 1

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> tuple[int, ...] | None:
        return self.window(len(schedule), iteration, seed)

    def window(self, num_steps: int, iteration: int, seed: int) -> tuple[int, ...] | None:
        """The window of an iteration; None: all steps but the last."""
        if self.window_size == 0:
            return None
        high = max(num_steps // 2, self.low + self.window_size) if self.high is None else self.high
        return random_window(num_steps, self.window_size, self.low, high, seed, iteration)


class FlowGrpoFast(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        plan, branch = super().plan(schedule, sampler, iteration, seed), self.config.branch
        if branch is None:
            return plan
        return replace(plan, tree=splits(len(schedule), {plan.train[0]: branch}, plan.train))

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = FlowGrpoFast
