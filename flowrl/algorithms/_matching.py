"""What the methods without log-probs share: they noise the finished samples again and compare networks there.

1. sample with the behaviour policy by any solver; keep x0 alone
2. rewards -> advantages A
3. for every sample T times sigma, each with fresh eps: x = alpha x0 + sigma eps
4. a loss on what the networks output at (x, sigma)
5. after the iteration the lagging roles follow the policy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from flowrl.algorithms.base import Networks, Options, SampleMethod
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.plan import StepPlan, deterministic, stochastic_solver
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import Solver
from flowrl.diffusion.training_times import Times, TimesConfig, draw, of_process
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.losses.matching import elbo_weight
from flowrl.models.weights import Weights
from flowrl.rollout.outputs import Outputs, evaluate, is_cfg, training_guidance
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class LagConfig:
    """A role that follows the policy after every iteration: role <- d role + (1 - d) policy.

    d is `start` for the first `flat` optimizer steps, then min(start + slope (steps - flat), limit).
    """

    flat: int = 0
    start: float = 0.0
    slope: float = 0.001
    limit: float = 0.5

    def __post_init__(self) -> None:
        if self.flat < 0 or self.slope < 0:
            raise ValueError(f"flat={self.flat} and slope={self.slope} must not be negative")
        for name in ("start", "limit"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")
        if self.start > self.limit:
            raise ValueError(f"start={self.start} is above limit={self.limit}")

    def decay(self, updates: int) -> float:
        """d after so many optimizer steps.

        >>> LagConfig().decay(600), LagConfig(flat=75, slope=0.0075, limit=0.999).decay(209)
        (0.5, 0.999)
        """
        if updates < self.flat:
            return self.start
        return min(self.start + self.slope * (updates - self.flat), self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    """A pull to another network: coef * mean over dims of the squared difference of the outputs."""

    coef: float
    weight: Literal["uniform", "elbo"] = "uniform"
    """`elbo` divides by 2 s^2 with the Flow-SDE's std rate s, which favours clean times."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"coef={self.coef} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisedConfig(Options):
    """Options of every method here, wherever its samples come from."""

    TERMS: ClassVar[int] = 1
    """Terms per sample where `times` is null."""

    times: TimesConfig | None = None
    """Where on the path the samples are noised to; see `flowrl/diffusion/training_times.py`. null, where that is the
    default: `timesteps`
    on noise-prediction models, `logit_normal` on flows."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull to the untouched network."""
    guidance_scale: float | None = None
    """Of the forwards in training; null: none where guidance is CFG, the rollout's where the network takes it."""
    passes: int = 1
    """Times that an iteration goes through its samples; noise and times of a sample stay the same."""

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"passes={self.passes} must be at least 1")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        self.terms(num_steps)

    def terms(self, num_steps: int) -> int:
        """Terms per sample on a grid of so many steps.

        Raises:
            ValueError: the grid has fewer nodes than the rule needs.
        """
        return self.TERMS if self.times is None else self.times.terms(num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingConfig(NoisedConfig):
    """Options of the methods that draw their samples and credit them by rewards."""

    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete"))

    solver: Solver = "dpm2_midpoint"
    """How a rollout is solved; `sa` adds noise."""
    solver_noise: float = 0.0
    """tau of `sa`, between sigma 0.3 and 0.9."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)

    def __post_init__(self) -> None:
        NoisedConfig.__post_init__(self)
        if self.advantages.name == "separate":
            raise ValueError(
                "advantages.name=separate: this method has one loss for all rewards; use per_reward or gdpo"
            )
        if self.solver_noise < 0:
            raise ValueError(f"solver_noise={self.solver_noise} must not be negative")
        if self.solver_noise > 0 and self.solver != "sa":
            raise ValueError(f"solver_noise={self.solver_noise}: only the solver 'sa' adds noise, not {self.solver!r}")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        NoisedConfig.check(self, sampler, num_steps)
        if self.solver == "sa" and num_steps < 3:
            raise ValueError(f"solver=sa needs at least 3 steps, rollout.num_inference_steps is {num_steps}")


N = TypeVar("N", bound=NoisedConfig)
C = TypeVar("C", bound=MatchingConfig)


class NoisedBase(SampleMethod[N]):
    """What a method here has unless its file says otherwise. Each file adds its loss, and its credit."""

    shared_times: Literal["sample", "group", "all"] = "sample"

    def __init__(self, config: N) -> None:
        super().__init__(config)
        self.passes = config.passes
        self.lags: dict[str, LagConfig] = {}
        self.roles = ("reference",) if config.kl.coef > 0 else ()

    def times(self, schedule: Schedule, ids: Sequence[SampleId], iteration: int, seed: int) -> Times:
        rule = self.config.times or of_process(schedule, self.config.TERMS)
        return draw(rule, schedule, ids, (seed, iteration), shared=self.shared_times)

    def compared(self, outputs: Outputs) -> Tensor:
        """What a loss with `keeps_old` compares with its past value, [M] float64."""
        raise NotImplementedError

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        scale = self.guidance(networks)["policy"]
        return self.compared(evaluate(networks.policy.adapter, networks.weights, batch, {"policy": scale}))

    def guidance(self, networks: Networks) -> dict[str, float]:
        """Guidance scale of every network that the loss evaluates."""
        policy = networks.policy
        scale = training_guidance(policy.adapter, policy.guidance_scale, self.config.guidance_scale)
        return dict.fromkeys(("policy", *self.roles), scale)

    def outputs(self, batch: NoisedBatch, networks: Networks) -> Outputs:
        """The policy's output with gradients, and those of the roles."""
        return evaluate(networks.policy.adapter, networks.weights, batch, self.guidance(networks))

    def finished(
        self,
        loss: Tensor,
        outputs: Outputs,
        metrics: dict[str, Tensor] | None = None,
        pulled: Tensor | float = 1.0,
    ) -> LossOutput:
        """The summed loss [M] with the pull to the reference (times `pulled`), and what every method reports."""
        found = {"policy/loss": loss, "matching/error": outputs.error()} | (metrics or {})
        if "reference" in outputs.by_role:
            loss = loss + pulled * pull(self.config.kl, outputs, "reference")
            found["matching/error_reference"] = outputs.error("reference")
            found["matching/norm_ratio"] = outputs.norm_ratio("reference")
        for role in outputs.by_role:
            if role != "policy":
                found[f"matching/to_{role}"] = outputs.apart(role)
        found["matching/clean_square"] = outputs.batch.clean.square().flatten(1).mean(dim=1)
        return LossOutput(loss=loss.sum(), metrics={name: value.detach().sum() for name, value in found.items()})

    def after_iteration(self, updates: int, weights: Weights) -> None:
        """Move the lagging roles; `updates` counts the optimizer steps of the run."""
        for role, lag in self.lags.items():
            weights.follow(role, lag.decay(updates))


class MatchingBase(NoisedBase[C]):
    """A method that draws its samples."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        config = self.config
        if config.solver == "sa":
            return stochastic_solver(schedule, config.solver_noise)
        return deterministic(schedule, config.solver)


def referred(guidance: dict[str, float], networks: Networks, own: float) -> dict[str, float]:
    """Guidance by role, the untouched network under CFG of its own."""
    if "reference" in guidance and is_cfg(networks.policy.adapter):
        return guidance | {"reference": own}
    return guidance


def pull(anchor: AnchorConfig, outputs: Outputs, role: str) -> Tensor:
    """coef * weight(sigma) * mean over dims of (policy - role)^2, [M] float64."""
    distance = anchor.coef * outputs.apart(role)
    return distance if anchor.weight == "uniform" else distance * elbo_weight(outputs.batch.sigma).to(distance)
