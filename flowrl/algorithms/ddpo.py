"""DDPO: every denoising step is an action of a Gaussian policy, rewarded by the finished image.

    1. roll out by DDIM with eta = 1, every step that leaves noise stochastic and trained
    2. A = (r - mean) / (std + 1e-6), of the prompt's own newest rewards once there are `min_count`, else of the whole
       iteration; clipped to +-5
    3. of its trained steps each sample keeps int(K * timestep_fraction), drawn anew
    4. importance: max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)), ratio = exp(log p(x'|x) - log p_old(x'|x))
       score:      -A log p(x'|x), whose gradient is right only before the policy moves: one update per rollout
       log p is the mean over latent dims; the loss the mean over samples and steps

No KL, no reference, no critic. The guided prediction is what is trained (`rollout.guidance_scale`).

Source: arXiv 2305.13301; kvablack/ddpo-pytorch:scripts/train.py, config/base.py; jannerm/ddpo.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.dance_grpo import ShareOptions
from flowrl.algorithms.flow_grpo import (
    ClipOptions,
    Terms,
    clipped_terms,
    ratio_metrics,
    single_advantage,
    with_reference,
)
from flowrl.core.errors import OptionError
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.history import HistoryConfig
from flowrl.diffusion.plan import StepPlan, noisy_steps
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(ShareOptions, StepOptions, ClipOptions, RatioOptions):
    default_sampler: ClassVar[str] = "ddim"

    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all that leave noise."""
    estimator: Literal["importance", "score"] = "importance"
    """`importance`: the clipped ratio (DDPO-IS); `score`: REINFORCE (DDPO-SF), for one update per rollout."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(name="batch", eps=1e-6, history=HistoryConfig())
    )
    passes: int = 1
    """Times that an iteration goes through its samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"passes={self.passes} must be at least 1")
        if self.estimator == "score" and self.passes > 1:
            raise OptionError(
                f"passes={self.passes}: estimator=score is right for the policy that drew the samples", {"passes": 1}
            )
        if self.estimator == "score" and self.surrogate != "clip":
            raise OptionError(
                f"surrogate={self.surrogate} is a loss of a ratio, and estimator=score has none",
                {"surrogate": "clip", "eta": None, "preserved": None},
            )

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int]:
        return noisy_steps(schedule) if self.sde_steps is None else self.sde_steps

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        # An upper bound: whether the last step is trained is known once there is a grid.
        self.check_trained(1, num_steps if self.sde_steps is None else len(self.sde_steps))

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        """Refuse optimizer steps of an iteration that the estimator does not allow."""
        if self.estimator == "score" and updates != 1:
            raise OptionError(
                "estimator=score has no ratio for samples of an older policy, and "
                f"optim.updates_per_iteration={updates}",
                [{"optim.updates_per_iteration": 1}, {"estimator": "importance"}],
            )


class Ddpo(EdgeMethod[Config]):
    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        return self.config.kept(ids, plan, iteration, seed)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        if self.config.estimator == "importance":
            terms = clipped_terms(log_ratio, [single_advantage(batch)], self.config.rule(sampler))
        else:
            loss = -single_advantage(batch) * log_ratio  # less log p_old, a constant, so that it begins at 0
            terms = Terms(loss, ratio_metrics(log_ratio, loss), {"policy/ratio": log_ratio.detach().exp()})
        return with_reference(terms, policy, batch, networks, self.config.kl)


build = Ddpo
