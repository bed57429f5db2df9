"""MixGRPO: a window of stochastic, trained steps slides from noisy to clean; all other steps are ODE steps.

    1. window [l, l + w) of the iteration; progressive: l moves on by s every tau iterations
    2. roll out G samples per prompt, stochastic in the window, Euler elsewhere
    3. A_k = (r_k - mean of the group) / (std of the group + 1e-8) for each reward k; A = sum_k w_k / (sum w) A_k,
       clipped to +-5
    4. loss as Flow-GRPO, on the steps of the window

As released, the last two steps are never trained.

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO:fastvideo/train_grpo_flux.py, fastvideo/utils/grpo_states.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.algorithms.base import EdgeMethod
from flowrl.algorithms.flow_grpo import ClippedOptions, clipped_loss
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedOptions):
    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where an image has something to see (docs/algorithms/vipo.md); null: everywhere."""
    window: MixWindow = field(default_factory=MixWindow)
    """The window and its moves; see `flowrl/diffusion/windows.py`."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="per_reward", std="group", eps=1e-8, ddof=1)
    )

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedOptions.check(self, sampler, num_steps)
        mix_window(self.window, num_steps, 0, 1)


class MixGrpo(EdgeMethod[Config]):
    loss = clipped_loss

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        steps = mix_window(self.config.window, len(schedule), seed, iteration)
        return window(schedule, sampler.default_noise_level(), steps)


build = MixGrpo
