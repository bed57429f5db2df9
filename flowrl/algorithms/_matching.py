"""Parts of the methods on finished samples: their options, roles that follow the policy, pulls to other networks.

1. sample with the behaviour policy by any solver; keep x0 alone
2. rewards -> advantages A
3. for every sample T times sigma, each with fresh eps: x = alpha x0 + sigma eps
4. a loss on what the networks output at (x, sigma)
5. after the iteration the lagging roles follow the policy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flowrl.algorithms._options import Options
from flowrl.core.errors import OptionError, Remedy
from flowrl.core.strict import require_positive
from flowrl.diffusion.solvers import SOLVERS, SolverName
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.matching import elbo_weight
from flowrl.rollout.outputs import Outputs
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class LagConfig:
    """A role that follows the policy after every iteration: role <- d role + (1 - d) policy.

    d is `start` for the first `flat` optimizer steps, then min(start + slope (steps - flat), limit).
    """

    flat: int = 0
    """Optimizer steps for which d is `start`."""
    start: float = 0.0
    """d at the start."""
    slope: float = 0.001
    """Rise of d with an optimizer step."""
    limit: float = 0.5
    """Largest d."""

    def __post_init__(self) -> None:
        if self.flat < 0 or self.slope < 0:
            raise ValueError(f"flat={self.flat} and slope={self.slope} must not be negative")
        for name, value in (("start", self.start), ("limit", self.limit)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be in [0, 1]")
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
    """Its weight in the loss; 0 evaluates no other network."""
    weight: Literal["uniform", "elbo"] = "uniform"
    """`elbo` divides by 2 s^2 with the Flow-SDE's std rate s, which favours clean times."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"coef={self.coef} must not be negative")


def pull(anchor: AnchorConfig, outputs: Outputs, role: str) -> Tensor | float:
    """coef * weight(sigma) * mean over dims of (policy - role)^2, [M] float64; 0 without a coefficient."""
    if anchor.coef == 0:
        return 0.0
    distance = anchor.coef * outputs.apart(role)
    return distance if anchor.weight == "uniform" else distance * elbo_weight(outputs.batch.sigma).to(distance)


def pulling(**anchors: AnchorConfig) -> tuple[str, ...]:
    """The roles, named by keyword, whose pull has a coefficient."""
    return tuple(role for role, anchor in anchors.items() if anchor.coef > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenOptions(Options):
    """Options of the methods whose samples are images of the data."""

    times: TimesConfig | None = None
    """Rule of the times that the samples are noised to; see `flowrl/diffusion/training_times.py`. null: `timesteps` on
    noise-prediction models, `logit_normal` on flows."""
    guidance_scale: float | None = None
    """Guidance scale of the forwards in training; null: none where guidance is CFG, the rollout's where the network
    takes it."""
    passes: int = 1
    """Times that an iteration goes through its samples; noise and times of a sample stay the same."""

    def __post_init__(self) -> None:
        require_positive(passes=self.passes)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        self.terms(num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnOptions(Options):
    """Options of the methods that draw their samples and credit them by rewards."""

    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete"))
    """Rule of the times that the samples are noised to; see `flowrl/diffusion/training_times.py`."""
    guidance_scale: float | None = None
    """Guidance scale of the forwards in training; null: none where guidance is CFG, else the rollout's."""
    passes: int = 1
    """Times that an iteration goes through its samples; noise and times of a sample stay the same."""
    solver: SolverName = "dpm2_midpoint"
    """Solver of the rollout; `sa` adds noise."""
    solver_noise: float = 0.0
    """tau of `sa`, between sigma 0.3 and 0.9."""

    def __post_init__(self) -> None:
        require_positive(passes=self.passes)
        if self.solver_noise < 0:
            raise ValueError(f"solver_noise={self.solver_noise} must not be negative")
        if self.solver_noise > 0 and not SOLVERS[self.solver].stochastic:
            raise OptionError(
                f"solver_noise={self.solver_noise}: only the solver 'sa' adds noise, not {self.solver!r}",
                remedies=[Remedy({"solver": "sa"}), Remedy({"solver_noise": 0.0})],
            )

    def check(self, sampler: Sampler, num_steps: int) -> None:
        self.terms(num_steps)
        least = SOLVERS[self.solver].least_steps
        if num_steps < least:
            raise OptionError(
                f"solver={self.solver} needs at least {least} steps, rollout.num_inference_steps is {num_steps}",
                remedies=[Remedy({"rollout.num_inference_steps": least})],
            )
