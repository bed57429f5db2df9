"""MixGRPO-Flash: MixGRPO with fewer steps after the window, taken by a second-order solver.

    1. window [l, l + w) as MixGRPO, on a grid of S steps; e is its last step
    2. of the S - e nodes after it keep n = int((S - e) * ratio), at least 2: DPM-Solver++ steps that begin with
       the x0_hat of the window's last step as their history. A rollout takes e + n forwards
    3. advantages and loss as MixGRPO

Flash* is `window: {strategy: frozen}` with ratio 0.2. A flow model with a static resolution shift is needed.

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO:fastvideo/utils/sampling_utils.py ("post" strategy).
"""

from dataclasses import dataclass, field
from typing import Literal

from flowrl.algorithms._options import RatioOptions, SpatialOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.algorithms.mix_grpo import WindowOptions
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.flash import flash
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import MixWindow
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(WindowOptions, SpatialOptions, ClipOptions, RatioOptions):
    window: MixWindow = field(default_factory=lambda: MixWindow(interval=20))
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
        super().__post_init__()
        if not 0 < self.ratio_kept <= 1:
            raise ValueError(f"ratio_kept={self.ratio_kept} must be in (0, 1]")
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift} must be positive")


class MixGrpoFlash(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        config = self.config
        return flash(
            schedule,
            sampler.default_noise_level(),
            config.stochastic_steps(schedule, iteration, seed),
            ratio=config.ratio_kept,
            shift=config.shift,
            solver=config.solver,
        )

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = MixGrpoFlash
