"""Adjoint Matching: the control that tilts the network's samples by exp(lambda R), learned as a regression.

    1. roll out by DDIM with eta 1, under which the first noise says nothing of the sample; the last step has no noise
    2. a_K = -lambda dR/dx0, and back through the untouched network (`training/adjoint_batches.py`)
    3. loss of a step = |(mu - mu_ref) / s + s a_k+1|^2, without CFG; no gradient from `loss_clip` lambda^2 on

Its minimum samples p(x) ~ p_ref(x) exp(lambda R(x)). `form: efficient`, derived here from the abstract of arXiv
2605.11480, needs no adjoint: x0 by the ODE, noised again to x at sigma, with D = (1 - sigma)^2 + sigma^2

    v* = v(x) - sigma / D (lambda dR/dx0 + (1 - m)^2 / m (v - v_ref)(x_m)),   x_m: x0 noised to m = 0.05

Source: arXiv 2409.08861; microsoft/soc-fine-tuning-sd.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._climbing import ClimbOptions, EndOptions
from flowrl.algorithms._credit import plain_rewards
from flowrl.algorithms.base import EdgeMethod, GradientMethod, Method, Networks
from flowrl.algorithms.dance_grpo import ShareOptions
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.core.types import Identity, SampleId
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.plan import StepPlan, solver_plan, window
from flowrl.diffusion.process import FlowProcess, Process, expand
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import GradientBatch, LossOutput, Microbatch, summed
from flowrl.losses.reward_gradients import Route, climbing
from flowrl.rollout.outputs import unguided
from flowrl.samplers.base import Sampler

LEVEL = "experimental"
QUIET = 0.01
"""A step that ends below this noise level has no noise: so little of it would tie the network to the untouched one."""
NEAR = 0.05
"""m: the noise level at which `efficient` compares the scores of the two networks."""


@dataclass(frozen=True, kw_only=True)
class Config(ShareOptions, EndOptions, ClimbOptions):
    default_sampler: ClassVar[str] = "ddim"

    strength: float = 1.0
    """lambda, the factor of the weighted sum of training values in the exponent of the target."""
    form: Literal["exact", "efficient"] = "exact"
    """`efficient`: the closed form of a linear drift on samples of the ODE; flows only, and derived, not published
    code."""
    window: float = 1.0
    """Share of the steps that are trained, the last that leave noise; `efficient`: that begin at sigma 0.05 or more."""
    growth: float | None = 1.5
    """`exact` leaves out all steps before a place above sigma 0.6 where adjoints are longer than this times those at
    the samples; null: none."""
    normalise: bool = True
    """`exact` divides the loss of a step by its mean over the iteration at the untouched network."""
    loss_clip: float | None = None
    """`exact`: a step's loss from this times lambda^2 on has no gradient (paper: 1.6); null: all have."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "growth", "loss_clip")
        require_not_negative(vars(self), "strength")

    def last(self, count: int) -> tuple[int, ...]:
        """The trained ones of so many steps."""
        return tuple(range(count - max(1, round(self.window * count)), count))

    def check_trained(self, samples: int, trained: int) -> None:
        if self.form == "exact":
            super().check_trained(samples, trained)

    def check_process(self, process: Process) -> None:
        if self.form == "efficient" and not isinstance(process, FlowProcess):
            raise OptionError("form=efficient is derived for flows", {"form": "exact"})


class AdjointMatching(EdgeMethod[Config]):
    adjoint = True

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        noisy = [k for k, end in enumerate(schedule.sigmas[1:-1]) if end >= QUIET]
        train = self.config.last(len(noisy))
        keep = tuple(k for k in range(train[0], len(schedule)) if k not in train)
        return replace(window(schedule, sampler.default_noise_level(), noisy), train=train, keep=keep)

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        return self.config.kept(ids, plan, iteration, seed)

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return plain_rewards(rewards, weights)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        plain, a = replace(networks, policy=unguided(networks.policy)), batch.columns["adjoint"]
        own, reference = plain.transition(batch), plain.frozen("reference", batch)
        std = expand(own.std, a)
        control = (own.mean - reference.mean) / std
        square = (control + std * a).square().flatten(1).sum(dim=1)
        most = torch.inf if self.config.loss_clip is None else self.config.loss_clip * self.config.strength**2
        loss = batch.columns["weight"] * square.clamp(max=most)
        output = summed(loss, {"adjoint/control": control.square().flatten(1).sum(dim=1)})
        clipped = (square.detach() >= most).float()
        return replace(output, per_step={"adjoint/loss": loss.detach(), "adjoint/clipped_share": clipped})


class Efficient(GradientMethod[Any]):
    def route(self, reach: int, iteration: int, seed: int) -> Route:
        return Route(reach - 1, self.config.last(reach), noised=True)

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        schedule.timestep_at(torch.tensor(NEAR))  # refused where it is not known
        return solver_plan(schedule)

    def loss(self, batch: GradientBatch, networks: Networks) -> LossOutput:
        policy, step, x, clean = unguided(networks.policy), batch.step, batch.latents, batch.clean
        assert clean is not None
        sigma, near = expand(step.sigma, x), replace(step, timestep=NEAR / step.sigma * step.timestep)
        place = (1 - NEAR) * clean + NEAR / sigma * (x - (1 - sigma) * clean), near, batch.cond
        with torch.no_grad():
            pull = policy.output(*place).float()
            with networks.weights.using("reference"):
                pull = (1 - NEAR) ** 2 / NEAR * (pull - policy.output(*place).float())
        tilt = self.config.strength * batch.coefficient + pull
        moved = replace(batch, coefficient=-sigma / ((1 - sigma) ** 2 + sigma**2) * tilt)
        return climbing(policy.output(x, step, batch.cond), moved)


def build(config: Config) -> Method[Any]:
    return AdjointMatching(config) if config.form == "exact" else Efficient(config)
