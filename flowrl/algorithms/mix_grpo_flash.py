"""MixGRPO-Flash: MixGRPO with fewer steps after the window, taken by a second-order solver.

    1. window [l, l + w) as MixGRPO, on a grid of S steps; e is its last step
    2. of the S - e nodes after it keep n = int((S - e) * ratio), at least 2: DPM-Solver++ steps that begin with
       the x0_hat of the window's last step as their history. A rollout takes e + n forwards
    3. advantages and loss as MixGRPO

Flash* is `window: {strategy: frozen}` with ratio 0.2. A flow model with a static resolution shift is needed.

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO:fastvideo/utils/sampling_utils.py ("post" strategy).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flowrl.algorithms.base import EdgeMethod
from flowrl.algorithms.flow_grpo import ClippedOptions, clipped_loss
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.flash import flash
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedOptions):
    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where an image has something to see (docs/algorithms/vipo.md); null: everywhere."""
    window: MixWindow = field(default_factory=lambda: MixWindow(interval=20))
    """The window and its moves; see `flowrl/diffusion/windows.py`."""
    ratio_kept: float = 0.4
    """Share of the nodes after the window that are kept, in (0, 1]."""
    shift: float = 3.0
    """Resolution shift of the model's own grid (its scheduler's `shift`), for the shortened part."""
    solver: Literal["ode", "dpm1", "dpm2_midpoint", "dpm2_heun"] = "dpm2_midpoint"
    """Solver of the steps after the window."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="per_reward", std="group", eps=1e-8, ddof=1)
    )

    def __post_init__(self) -> None:
        ClippedOptions.__post_init__(self)
        if not 0 < self.ratio_kept <= 1:
            raise ValueError(f"ratio_kept={self.ratio_kept} must be in (0, 1]")
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift} must be positive")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedOptions.check(self, sampler, num_steps)
        mix_window(self.window, num_steps, 0, 1)


class MixGrpoFlash(EdgeMethod[Config]):
    loss = clipped_loss

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        config = self.config
        steps = mix_window(config.window, len(schedule), seed, iteration)
        return flash(
            schedule,
            sampler.default_noise_level(),
            steps,
            ratio=config.ratio_kept,
            shift=config.shift,
            solver=config.solver,
        )


build = MixGrpoFlash
