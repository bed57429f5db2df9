"""One training forward of each kind, and the output of a loss. Shapes in the letters of `flowrl.core.types`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from flowrl.core.types import Condition, Step
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One training forward: N latents, and the E edges that start from them."""

    latents: Tensor
    """Latents at which the edges start, each once, [N, ...]."""
    start: Step
    """Step from each of the latents, [N]."""
    cond: Condition
    """Condition of each of the latents, N rows."""
    parent: Tensor
    """Row of `latents` at which each edge starts, [E] int64."""
    next_latents: Tensor
    """Latents at which each edge ends, [E, ...]."""
    step: Step
    """Step of each edge, [E]."""
    old_log_prob: Tensor
    """[E, *pos]."""
    advantage: Tensor
    """[E, R, *pos]; R = 1 unless an algorithm keeps rewards apart."""
    place: Tensor
    """Position of each edge in the requested order, [E] int64, on the CPU."""
    plan: StepPlan
    """The rollout's plan, for losses that weigh its steps against each other."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    alone: bool = False
    """Every edge starts from a row of its own, in their order: `parent` is 0 .. E - 1."""

    def __len__(self) -> int:
        return len(self.old_log_prob)

    @property
    def steps(self) -> Tensor:
        """Index into the plan of each row, [E] int64, on the CPU."""
        return self.step.on_cpu.index

    def by_edge(self, values: Tensor) -> Tensor:
        """Values [N, ...] of the latents for each edge, [E, ...]."""
        return values if self.alone else values[self.parent]


@dataclass(frozen=True, slots=True)
class NoisedBatch:
    """One training forward of a method without log-probs: M terms, each a sample noised again to one time."""

    steps: ClassVar[None] = None
    """Its rows are of no step of the plan."""

    clean: Tensor
    """x0 of each term's sample, [M, ...] float32."""
    eps: Tensor
    """Fresh noise, [M, ...] float32."""
    sigma: Tensor
    """[M] float32."""
    timestep: Tensor
    """The network's input at sigma, [M] float32."""
    cond: Condition
    """M rows."""
    advantage: Tensor
    """Credit of each term's sample, [M]."""
    sample: Tensor
    """Number of the sample in the iteration, the same for all its terms, [M] int64."""
    group: Tensor
    """Number of its prompt and time: terms that are compared with each other, [M] int64."""
    old: Tensor | None = None
    """Value under the behaviour policy that the loss compares with, [M] float64; None: the method keeps none."""
    margin: Tensor | None = None
    """Difference of rewards between the two samples of each term's pair, [M]; None: not known."""
    centre: Tensor | None = None
    """Means of the method's `measured`, over all terms of the update and all processes, [K] float64."""

    def __len__(self) -> int:
        return len(self.sigma)


@dataclass(frozen=True, slots=True)
class GradientBatch:
    """One training forward of a method on the gradient of rewards: a step of M samples."""

    latents: Tensor
    """Latents at the step, [M, ...]."""
    step: Step
    """[M]."""
    cond: Condition
    """M rows."""
    coefficient: Tensor
    """c: the gradient of the rewards at the network's output there, [M, ...] float32."""
    metrics: Mapping[str, Tensor]
    """What the rewards said, name -> [M]."""
    clean: Tensor | None = None
    """The finished samples, [M, ...], where `latents` are they, noised again; c is then the gradient at them."""

    def __len__(self) -> int:
        return len(self.coefficient)

    @property
    def steps(self) -> Tensor:
        """Index into the plan of each row, [M] int64, on the CPU."""
        return self.step.on_cpu.index


@dataclass(frozen=True, slots=True)
class StateBatch:
    """One training forward at kept latents of a rollout: M of them, of the prompts of one domain."""

    latents: Tensor
    """[M, ...]."""
    step: Step
    """[M]."""
    cond: Condition
    """M rows."""
    domain: int
    """Number of the domain."""

    def __len__(self) -> int:
        return len(self.latents)

    @property
    def steps(self) -> Tensor:
        """Index into the plan of each row, [M] int64, on the CPU."""
        return self.step.on_cpu.index


@dataclass(frozen=True, slots=True)
class InitialBatch:
    """One training forward of a method on the initial noise: M samples and the noise that they started from."""

    steps: ClassVar[None] = None
    """Its rows are of no step of the plan."""

    latents: Tensor
    """Initial latents of each sample, [M, ...] float32."""
    numbers: Tensor
    """Number of the noise distribution that drew them, [M] int64."""
    advantage: Tensor
    """[M]."""
    old_log_prob: Tensor
    """Log-prob under that distribution as it was then, [M] float64."""

    def __len__(self) -> int:
        return len(self.advantage)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A summed loss and summed metrics; the trainer divides both by the global count."""

    loss: Tensor
    """Scalar: the SUM over the microbatch, so that ranks with different counts average exactly."""
    metrics: dict[str, Tensor]
    """Name -> sum over the microbatch, scalar, detached."""
    per_step: dict[str, Tensor] = field(default_factory=dict)
    """Name -> value per edge, [E], detached; reported per denoising step."""


def summed(loss: Tensor, metrics: Mapping[str, Tensor]) -> LossOutput:
    """The loss [M] and the metrics, name -> [M], as sums over the rows."""
    return LossOutput(loss=loss.sum(), metrics={name: value.detach().sum() for name, value in metrics.items()})
