"""MixGRPO: a window of stochastic, trained steps slides from noisy to clean; all other steps are ODE steps.

    1. window [l, l + w) of the iteration; progressive: l moves on by s every tau iterations
    2. roll out G samples per prompt, stochastic in the window, Euler elsewhere
    3. A_k = (r_k - mean of the group) / (std of the group + 1e-8) for each reward k; A = sum_k w_k / (sum w) A_k,
       clipped to +-5
    4. loss as Flow-GRPO, on the steps of the window

As released, the last two steps are never trained.

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO:fastvideo/train_grpo_flux.py, fastvideo/utils/grpo_states.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrl.algorithms._options import Options, RatioOptions, SpatialOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    """The window that moves over the grid."""

    window: MixWindow = field(default_factory=MixWindow)
    """The window and its moves; see `flowrl/diffusion/windows.py`."""

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int]:
        return mix_window(self.window, len(schedule), seed, iteration)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        mix_window(self.window, num_steps, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Config(WindowOptions, SpatialOptions, ClipOptions, RatioOptions):
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="per_reward", std="group", eps=1e-8, ddof=1)
    )


class MixGrpo(EdgeMethod[Config]):
    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = MixGrpo
