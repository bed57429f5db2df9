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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from torch import Tensor

from flowrl.algorithms._options import Options, RatioOptions, SpatialOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_terms, with_reference
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.windows import step_subsets
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class SeparateConfig(AdvantageConfig):
    """An advantage rule, or one advantage for each reward, which no other method's loss takes."""

    name: Literal[
        "group", "per_reward", "gdpo", "separate", "median", "batch", "best_of", "smooth", "leave_one_out"
    ] = "group"

    @classmethod
    def published(cls) -> Self:
        """DanceGRPO's: the standard deviation of a group, with one degree of freedom less."""
        return cls(name="separate", std="group", eps=1e-8, ddof=1)


@dataclass(frozen=True, kw_only=True)
class ShareOptions(Options):
    """The share of the steps that a sample trains."""

    timestep_fraction: float = 1.0
    """Share of the trained steps that each sample keeps, rounded down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction={self.timestep_fraction} must be in (0, 1]")

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a share that leaves a sample of `trained` steps none."""
        if int(trained * self.timestep_fraction) < 1:
            raise ValueError(
                f"timestep_fraction={self.timestep_fraction} of {trained} trained steps keeps none; "
                f"it must be at least {1 / max(trained, 1):.3g}"
            )

    def kept(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        """The steps that each sample keeps of the plan's trained ones, [E] bool."""
        return step_subsets(ids, plan.train, self.timestep_fraction, seed, iteration).flatten()


@dataclass(frozen=True, kw_only=True)
class Config(ShareOptions, SpatialOptions, StepOptions, ClipOptions, RatioOptions):
    default_sampler: ClassVar[str] = "dance_sde"

    timestep_fraction: float = 0.6
    advantages: SeparateConfig = field(default_factory=SeparateConfig.published)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        self.check_trained(1, self.most_trained(num_steps))


class DanceGrpo(EdgeMethod[Config]):
    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        return self.config.kept(ids, plan, iteration, seed)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        # One column per reward, its weight inside: max() and a sum over rewards do not commute where a clip is active.
        terms = clipped_terms(log_ratio, batch.advantage.unbind(1), self.config.rule(sampler))
        return with_reference(terms, policy, batch, networks, self.config.kl)


build = DanceGrpo
