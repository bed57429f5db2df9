"""What a method declares: its data, its plan, its advantage rule, its loss. The trainer does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from flowrl.advantages import Advantages
from flowrl.batches import LossOutput, Microbatch, NoisedBatch
from flowrl.learned_noise import NoiseWeights
from flowrl.models.weights import Weights
from flowrl.plan import StepPlan
from flowrl.rollout import Policy
from flowrl.samplers.base import LogProbForm, Sampler, StepDistribution
from flowrl.schedules import Schedule
from flowrl.spatial import SpatialConfig
from flowrl.times import Times
from flowrl.trajectories import Rollout
from flowrl.transitions import Transitions
from flowrl.types import Edges, Identity, Member, SampleId, Unit
from flowrl.value import ValueConfig, ValueNetwork


@dataclass(frozen=True, slots=True)
class Networks:
    """The policy with its weights' roles, as a loss sees them."""

    policy: Policy
    weights: Weights

    def transition(self, batch: Microbatch) -> StepDistribution:
        """The policy's distribution for each of the E edges, with gradients: one forward per place they start from."""
        return self.policy.transition(batch.latents, batch.start, batch.cond).at(batch.parent)

    def frozen(self, role: str, batch: Microbatch) -> StepDistribution:
        """The same with another role's weights and no gradients."""
        with torch.no_grad(), self.weights.using(role):
            return self.transition(batch)


class Algorithm(Protocol):
    """What every method declares.

    `needs`: trained steps of the rollout, its finished samples, or the noise that these began with. `members` says
    where each sample of a slot comes from; empty, the rollout draws all of them. `roles` are
    snapshots it needs ("reference", "anchor", "old"); `behaviour` the one that draws the samples; `passes` how often an
    iteration goes through its data; `feedback` the names of its loss metrics whose means over all processes
    `after_update` is to be given.
    """

    config: Any
    needs: Literal["edges", "samples", "noise"]
    members: tuple[Member, ...]
    roles: tuple[str, ...]
    behaviour: str
    passes: int
    feedback: tuple[str, ...]
    level: str

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of this iteration, the same on every rank; `seed` is the run's, for windows drawn at random."""
        ...

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """From all rewards of the iteration, [R, P, G] with NaN for failures, and weights [R]; asked for once.

        `prompts` are those of the P slots, for rules that remember them. The same on every process.
        With `spatial` they come unclipped, with their bound: the clip follows the map.
        """
        ...

    def retired(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Prompts of the iteration that are to be drawn no more, [P] bool."""
        ...

    def loss(self, batch: Any, networks: Networks) -> LossOutput:
        """Sum over the microbatch; the trainer divides by the global number of edges or terms."""
        ...

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        """Called after each optimizer step, the `updates`-th of the run, with the means of `feedback`."""
        ...

    def after_iteration(self, updates: int, weights: Weights) -> None:
        """Called after the last optimizer step of an iteration, the `updates`-th of the run."""
        ...

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


class EdgeAlgorithm(Algorithm, Protocol):
    """A method on the stochastic steps of a rollout and their log-probs.

    `columns` are extras of the rollout; `spatial` how its advantages are spread over a picture, None where a sample
    has one; `weighs_paths` asks for `Rollout.paths`; `transitions` what is kept over iterations
    (`TransitionAlgorithm`), None where an iteration trains its own steps, each once a pass.
    """

    columns: tuple[str, ...]
    spatial: SpatialConfig | None
    transitions: Transitions | None
    weighs_paths: bool

    def on_tree(self, credit: Advantages, rollout: Rollout, weights: Tensor, iteration: int) -> Advantages:
        """Credit by edge from that of the samples; asked for where the plan branches. `rollout.rewards` have all."""
        ...

    def annotated(self, rollout: Rollout, credit: Advantages) -> Edges:
        """This rank's edges, with columns that follow from the credit where the loss has some."""
        ...

    def log_prob_form(self, sampler: Sampler) -> LogProbForm:
        """Of the stored log-probs: the sampler's own, unless the method needs another."""
        ...

    def log_ratio(self, policy: StepDistribution, batch: Microbatch, sampler: Sampler) -> Tensor:
        """The log ratio that the loss uses, [E, *pos]: 0 where the policy is the one that drew the edges."""
        ...

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor | None:
        """Which edges of a rollout are trained, [E] bool in their order (sample, step); None: all."""
        ...

    def parity_tolerance(self, sampler: Sampler, dtype: torch.dtype) -> float:
        """Largest |log ratio| allowed when the rollout is replayed before the first update."""
        ...


class TransitionAlgorithm(EdgeAlgorithm, Protocol):
    """A method that trains on transitions of this and earlier iterations, drawn anew for each update.

    `critic` expects their rewards. Both are the same on every process, and `tensors` puts them into the checkpoint.
    """

    transitions: Transitions
    critic: ValueNetwork | None

    def judge(self, features: int, num_steps: int, seed: int, device: torch.device) -> ValueNetwork:
        """The critic, made for so many features of a transition where there is none yet."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """After `load_state_dict`."""
        ...


class SampleAlgorithm(Algorithm, Protocol):
    """A method on finished samples, noised again.

    `unit` is what one forward must hold whole; `shared_eps` gives a prompt's samples one noise at each time;
    `keeps_old` asks for `old` of the behaviour policy; `centres` for the means of what is `measured`, in a pass of its
    own before each update; `frozen` counts the networks that a forward is compared with.
    """

    unit: Unit
    shared_eps: bool
    keeps_old: bool
    centres: bool
    frozen: int

    def taken(self, group_size: int) -> int:
        """Samples of a group that take part in the updates, at most."""
        ...

    def times(self, schedule: Schedule, ids: Sequence[SampleId], iteration: int, seed: int) -> Times:
        """Training times of B samples, [B, T]."""
        ...

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """What the loss compares with, [M] float64, of the weights that are in the network."""
        ...

    def measured(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """What the loss wants the means of, [M, K] float64, of the policy as it is before the update."""
        ...


class PreferenceAlgorithm(SampleAlgorithm, Protocol):
    """A method that says which of two pictures it prefers, or whether it likes one."""

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """How far each term agrees with the data's +1 and -1, [M] float64: positive where it does."""
        ...


class NoiseAlgorithm(Algorithm, Protocol):
    """A method on the initial noise, whose law it learns for each training prompt; the network is frozen.

    `train_std` False learns the means alone; `value` are the options of V, None without one.
    """

    train_std: bool
    value: ValueConfig | None

    def calibrated(self, credit: Advantages, numbers: Tensor, weights: NoiseWeights) -> tuple[Tensor, float | None]:
        """(advantages [P, G] by the laws `numbers` [P] that drew the samples, V's mean squared error)."""
        ...

    def log_prob(self, latents: Tensor, numbers: Tensor, weights: NoiseWeights) -> Tensor:
        """Of latents [M, ...] under the laws `numbers` [M] as they are now, [M] float64."""
        ...


def parity_tolerance(clip_range: float, dtype: torch.dtype) -> float:
    """A tenth of the clip range, at most 1e-5 in float32 and 2e-3 in half precision."""
    return min(clip_range / 10, 1e-5 if dtype == torch.float32 else 2e-3)
