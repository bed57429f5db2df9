"""On-policy distillation: the student learns from teachers at the states of its own rollouts.

    1. roll out with the student, by the ODE or a sampler's noise; keep the latents x_k
    2. each prompt has one teacher, by its `domain`; the teacher has its own guidance
    3. at drawn steps of every sample, both networks at the same x_k:
       loss = w_k mean_d (v - v_T)^2, w_k = 1, or those of the KL of the two steps, gain_k^2 / (2 s_k^2)
    4. one optimizer step on all domains together

gain_k is d mean / d velocity of the sampler's step and s_k its std, 1 on the ODE. No noise enters the loss, so it has
the gradient that a policy gradient with the sampled log-ratio to the teacher has in expectation, without its variance.
Rewards are watched alone, and may be none.

Without teachers, or where one's path is null, the teacher is the untouched network, which differs from the student by
`teacher_guidance`: CFG is distilled into one forward a step.

Source: arXiv 2605.15055; Tencent-Hunyuan/UniRL:unirl/algorithms/diffusionopd.py. Equal weights and the ODE are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import Options
from flowrl.algorithms.base import Networks, StateMethod
from flowrl.core.errors import OptionError
from flowrl.core.paths import PATH
from flowrl.core.rng import permutation
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.core.types import SampleId, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import Process
from flowrl.losses.batches import LossOutput, StateBatch
from flowrl.models.weights.teachers import Teaching
from flowrl.samplers.base import Sampler, step_std

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    default_sampler: ClassVar[str] = "ode"

    teachers: Annotated[dict[str, str | None], PATH] = field(default_factory=dict[str, str | None])
    """Domain -> a LoRA or a run's folder, whose weights teach the prompts whose records have that `domain`; null: the
    untouched network does. With one teacher all prompts are its; without any they are the untouched network's."""
    teacher_guidance: float | None = None
    """Guidance scale of the teachers, in the pipeline's units; null: that of the rollout."""
    weight: Literal["equal", "kl"] = "equal"
    """Weights of the steps: `kl`, those of the Gaussian KL of the sampler's steps, trains the cleanest almost alone."""
    nodes: int | None = 2
    """Steps at which a sample is trained, drawn anew in each iteration; null: all."""
    compared: int = 64
    """Evaluated prompts of each domain on which the rewards compare the teachers with the base before the first
    iteration; 0: no comparison."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "nodes")
        require_not_negative(vars(self), "compared")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        if self.nodes is not None and self.nodes > num_steps:
            raise OptionError(f"nodes={self.nodes}: a rollout has {num_steps} steps", {"nodes": num_steps})

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        if updates > 1:
            raise OptionError(
                f"optim.updates_per_iteration={updates}: all domains of an iteration are one update, at the states of "
                "the very network that it moves",
                {"optim.updates_per_iteration": 1},
            )


class Opd(StateMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teaching = Teaching.of("algorithm.teachers", config.teachers, config.teacher_guidance, config.compared)
        self.roles = tuple(dict.fromkeys(self.teaching.domains.values()))

    @property
    def frozen(self) -> int:
        return 1  # each row has one teacher

    def steps(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        keep = torch.tensor(plan.keep)
        drawn = [permutation(len(keep), seed, "nodes", iteration, i.slot, i.sample) for i in ids]
        return keep[torch.stack(drawn)[:, : self.config.nodes].sort(dim=1).values]

    def loss(self, batch: StateBatch, networks: Networks) -> LossOutput:
        policy, place = networks.policy, (batch.latents, batch.step, batch.cond)
        scale = policy.guidance_scale if self.teaching.guidance is None else self.teaching.guidance
        name, role = list(self.teaching.domains.items())[batch.domain]
        own = policy.predict(*place).velocity.float()
        with torch.no_grad(), networks.weights.using(role):
            teacher = replace(policy, guidance_scale=scale).predict(*place).velocity.float()
        apart = (own - teacher).square().flatten(1).mean(dim=1)
        weight = kl_weight(policy.sampler, policy.adapter.process, batch.step) if self.config.weight == "kl" else 1.0
        loss, told = weight * apart, apart.detach()
        metrics = {"opd/distance": told.sum(), f"opd/distance_{name}": told.sum()}
        return LossOutput(loss.sum(), metrics, {"opd/distance": told})

    def warning(self, row: Mapping[str, Any]) -> str | None:
        same = [
            name for name in self.teaching.domains if row["iteration"] == 1 and row.get(f"opd/distance_{name}") == 0
        ]
        if not same:
            return None
        return (
            f"the teacher of {', '.join(same)} is the student itself: their outputs do not differ at all before the "
            "first update; give another path in algorithm.teachers, or another algorithm.teacher_guidance"
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"teachers": dict(self.teaching.digests)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self.teaching.require_same(rest.pop("teachers", {}))
        super().load_state_dict(rest)


def kl_weight(sampler: Sampler, process: Process, step: Step) -> Tensor:
    """Weight of mean_d (v - v_T)^2 that makes it the KL of two steps of the sampler, [M]; without noise s is 1."""
    std = step_std(sampler, process, step)
    return sampler.velocity_gain(step).square() / (2 * torch.where(std > 0, std, 1.0).square())


build = Opd
