"""DanceGRPO: GRPO with constant noise, a random subset of the steps for each sample, one loss per reward.

    1. roll out G samples per prompt from one shared noise (`rollout.shared_noise`), every step but the last with the
       Dance-SDE: std = eta sqrt(|dt|)
    2. A_k = (r_k - mean of the group) / (std of the group + 1e-8) for each reward k, clipped to +-5; of n samples
       keep the best and the worst by sum_k w_k A_k (`advantages.select`), without normalising again
    3. of the K trained steps each sample keeps int(K * timestep_fraction), drawn anew
       loss = sum_k max(-w_k A_k ratio, -w_k A_k clamp(ratio, 1 - c, 1 + c))

The last step is deterministic, so the decoded latent is its x0_hat, as in the official code. No KL by default.

Source: arXiv 2505.07818; XueZeyue/DanceGRPO:fastvideo/train_grpo_flux.py, train_grpo_hunyuan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClippedOptions, clipped_terms, with_reference
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.windows import step_subsets
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeparateConfig(AdvantageConfig):
    """An advantage rule, or one advantage for each reward, which no other method's loss takes."""

    name: Literal["group", "per_reward", "gdpo", "separate", "median", "batch"] = "group"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedOptions):
    default_sampler: ClassVar[str] = "dance_sde"

    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all but the last."""
    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where an image has something to see (docs/algorithms/vipo.md); null: everywhere."""
    timestep_fraction: float = 0.6
    """Share of the trained steps that each sample keeps, rounded down."""
    advantages: SeparateConfig = field(
        default_factory=lambda: SeparateConfig(name="separate", std="group", eps=1e-8, ddof=1)
    )

    def __post_init__(self) -> None:
        ClippedOptions.__post_init__(self)
        check_share(self.timestep_fraction)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedOptions.check(self, sampler, num_steps)
        self.check_trained(1, num_steps - 1 if self.sde_steps is None else len(self.sde_steps))

    def check_trained(self, samples: int, trained: int) -> None:
        check_kept(self.timestep_fraction, trained)


def check_share(timestep_fraction: float) -> None:
    if not 0 < timestep_fraction <= 1:
        raise ValueError(f"timestep_fraction={timestep_fraction} must be in (0, 1]")


def check_kept(timestep_fraction: float, trained: int) -> None:
    """Refuse a share that leaves a sample of `trained` steps none."""
    if int(trained * timestep_fraction) < 1:
        raise ValueError(
            f"timestep_fraction={timestep_fraction} of {trained} trained steps keeps none; "
            f"it must be at least {1 / max(trained, 1):.3g}"
        )


def random_steps(self: EdgeMethod[Any], ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
    """The steps that each sample keeps of the plan's trained ones, [E] bool."""
    return step_subsets(ids, plan.train, self.config.timestep_fraction, seed, iteration).flatten()


class DanceGrpo(EdgeMethod[Config]):
    kept_edges = random_steps

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        # One column per reward, its weight inside: max() and a sum over rewards do not commute where a clip is active.
        terms = clipped_terms(log_ratio, batch.advantage.unbind(1), self.config.clip(sampler))
        return with_reference(terms, policy, batch, networks, self.config.kl)


build = DanceGrpo
