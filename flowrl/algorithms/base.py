"""The interface of a training method: its data, its plan, its advantage rule, its loss. The trainer does the rest.

A new method is a file with a `Config` (an `Options`) and a `build(config)` that gives one of

    EdgeMethod     trains on the stochastic steps of a rollout and their log-probs
    SampleMethod   trains on finished samples, drawn or given as pairs and labels, that are noised again
    NoiseMethod    trains the distribution of the initial noise

and writes its plan, its credit rule and its loss. Everything else has a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms._credit import Rule, by_steps, leaf_advantages
from flowrl.core.types import Edges, Identity, Member, SampleId, Unit
from flowrl.credit.advantages import AdvantageConfig, Advantages
from flowrl.credit.critic import ValueConfig, ValueNetwork
from flowrl.credit.saliency import SpatialConfig
from flowrl.credit.tree_credit import propagated
from flowrl.diffusion.plan import StepPlan, deterministic, window
from flowrl.diffusion.process import Process
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.training_times import Times
from flowrl.losses.batches import LossOutput, Microbatch, NoisedBatch
from flowrl.models.weights import Weights
from flowrl.rollout.learned_noise import NoiseWeights
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Rollout
from flowrl.rollout.transitions import Transitions
from flowrl.samplers.base import LogProbForm, Sampler, StepDistribution


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The base of every method's `Config`: checks, and what others ask of options that a method does not have.

    A class variable here becomes an option where a method declares a field of its name. Checks raise ValueError that
    names the key, the value and the remedy; they are called before a model is loaded, unless they say otherwise.
    """

    default_sampler: ClassVar[str] = "flow_sde"
    """Sampler where the run names none."""
    least_trees: ClassVar[int] = 1
    """Trees that a prompt needs at least, to have something to compare."""
    advantages: ClassVar[AdvantageConfig | None] = None
    """Advantage rule; None: that of `group` with its defaults, or the method credits by itself."""
    guidance_scale: ClassVar[float | None] = None
    """Guidance scale of the training forward; None: the rollout's."""
    old_log_prob: ClassVar[Literal["rollout", "recompute"]] = "rollout"
    """Where old log-probs come from."""
    sde_steps: ClassVar[list[int] | None] = None
    """Steps that are stochastic and trained; None: those of the method's plan."""
    spatial: ClassVar[SpatialConfig | None] = None
    """How advantages are spread over an image; None: a sample has one."""
    path_weight: ClassVar[float] = 0.0
    """Weight of a leaf's log-prob where a tree's leaves are averaged; 0: all alike."""
    shift: ClassVar[float] = 1.0
    """Resolution shift of the grid that the plan presumes."""

    @property
    def by_position(self) -> bool:
        """Whether every latent position has its own ratio."""
        return self.spatial is not None and self.spatial.ratio == "position"

    def clip(self, sampler: Sampler) -> float:
        """The bound on |ratio - 1| in use; inf: none."""
        return float("inf")

    def leaves(self, num_steps: int) -> int:
        """Samples of a tree on a grid of so many steps; 1: there is none."""
        return 1

    def check(self, sampler: Sampler, num_steps: int) -> None:
        """Refuse what the run's sampler and number of denoising steps do not allow."""

    def check_group(self, group_size: int) -> None:
        """Refuse what a group of this size cannot give."""
        if self.advantages is not None:
            self.advantages.check_group(group_size)

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        """Refuse numbers of samples, denoising steps and optimizer steps of an iteration that do not go together."""

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a number of trained steps, known once the model's grid is, for `samples` samples of an iteration."""

    def check_process(self, process: Process) -> None:
        """Refuse the model's process, known once the model is."""


C = TypeVar("C", bound=Options)


class Method(Generic[C]):
    """A training method. Attributes and hooks are defaults; `plan`, `advantages` and `loss` are the method's own."""

    Config: ClassVar[type[Options]] = Options
    """The options of a method whose file defines no `Config`; one that does extends it."""
    needs: ClassVar[Literal["edges", "samples", "noise"]]
    """The training data: trained steps of the rollout, its finished samples, or the noise that these began with."""
    level: str = "experimental"
    members: tuple[Member, ...] = ()
    """Where each sample of a slot comes from; empty: the rollout draws all of them."""
    prefers: bool = False
    """Whether `preferred` says which of two given images the policy likes better."""
    roles: tuple[str, ...] = ()
    """Snapshots of the weights that the method needs: "reference", "anchor", "old", ..."""
    behaviour: str = "policy"
    """The role whose weights draw the samples."""
    passes: int = 1
    """Times that an iteration goes through its data."""
    feedback: tuple[str, ...] = ()
    """Names of loss metrics; their means over all processes are passed to `after_update`."""
    unit: Unit = "term"
    """The part of the data that one forward must hold whole."""
    centres: bool = False
    """Whether the loss takes the means of what is `measured`, in a pass of its own before each update."""
    spatial: SpatialConfig | None = None
    """How advantages are spread over an image; None: a sample has one."""

    def __init__(self, config: C) -> None:
        self.config, self.rule = config, Rule(config.advantages or AdvantageConfig())

    @property
    def frozen(self) -> int:
        """Networks without gradients that a forward of an update is compared with."""
        return len(self.roles)

    @property
    def recompute(self) -> bool:
        """Whether old log-probs are evaluated once more at training geometry."""
        return self.config.old_log_prob == "recompute"

    def taken(self, group_size: int) -> int:
        """Samples of a group that take part in the updates, at most."""
        rule = self.rule.config.select
        return group_size if rule is None else rule.keep

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of this iteration, the same on every rank; `seed` is the run's, for windows drawn at random."""
        raise NotImplementedError

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """Credit of all samples, by the advantage rule unless the method has its own. Asked for once an iteration.

        Args:
            rewards: of the iteration, [R, P, G] with NaN for failures; the same on every process.
            weights: of the rewards, [R].
            prompts: those of the P slots, for rules that remember them.

        Returns:
            The credit; with `spatial` unclipped, with its bound: the clip follows the map.
        """
        return self.rule(rewards, weights, prompts, clipped=self.spatial is None)

    def retired(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Prompts of the iteration that are no longer sampled, [P] bool."""
        return torch.zeros(rewards.shape[1], dtype=torch.bool)

    def loss(self, batch: Any, networks: Networks) -> LossOutput:
        """Sum over the microbatch; the trainer divides by the global number of edges or terms."""
        raise NotImplementedError

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """How far each term agrees with the data's +1 and -1, [M] float64: positive where it does."""
        raise NotImplementedError

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        """Called after each optimizer step, the `updates`-th of the run, with the means of `feedback`."""

    def after_iteration(self, updates: int, weights: Weights) -> None:
        """Called after the last optimizer step of an iteration, the `updates`-th of the run."""

    # ---- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain data that the method remembers."""
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint.

        Raises:
            ValueError: it holds state of another method.
        """
        if self.rule.load_state_dict(state):
            name, own = type(self).__module__.rpartition(".")[2], sorted(self.state_dict())
            raise ValueError(f"{name} keeps {own or 'no state'}, the checkpoint has {sorted(state)}")

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that the method remembers."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the tensors of a checkpoint, where it has some; called after `load_state_dict`."""


class EdgeMethod(Method[C]):
    """A method on the stochastic steps of a rollout and their log-probs."""

    needs = "edges"
    columns: tuple[str, ...] = ()
    """Extra tensors that the rollout records for each edge."""
    transitions: Transitions | None = None
    """Transitions of this and earlier iterations, of which each update draws its own; None: an iteration trains its own
    steps, each once a pass."""
    critic: ValueNetwork | None = None
    """The network that expects the rewards of `transitions`."""

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.spatial = config.spatial

    @property
    def weighs_paths(self) -> bool:
        """Whether credit needs the log-probs of a tree's paths, `Rollout.paths`."""
        return self.config.path_weight != 0

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """All steps but the last are stochastic and trained."""
        return window(schedule, sampler.default_noise_level())

    def on_tree(self, credit: Advantages, rollout: Rollout, weights: Tensor, iteration: int) -> Advantages:
        """Credit by edge from that of the samples, if the plan branches: the mean of the leaves after an edge."""
        tree = rollout.plan.tree
        assert tree is not None
        return by_steps(credit, propagated(leaf_advantages(credit), tree), False, None)

    def annotated(self, rollout: Rollout, credit: Advantages) -> Edges:
        """The edges of this rank, with columns that follow from the credit where the loss has some."""
        return rollout.edges

    def log_prob_form(self, sampler: Sampler) -> LogProbForm:
        """The form of the stored log-probs."""
        return "position" if self.config.by_position else sampler.log_prob_form

    def log_ratio(self, policy: StepDistribution, batch: Microbatch, sampler: Sampler) -> Tensor:
        """The log ratio that the loss uses, [E, *pos]: 0 where the policy is the one that drew the edges."""
        return policy.log_prob(batch.next_latents, self.log_prob_form(sampler)) - batch.old_log_prob

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor | None:
        """The edges of a rollout that are trained, [E] bool in their order (sample, step); None: all."""
        return None

    def parity_tolerance(self, sampler: Sampler, dtype: torch.dtype) -> float:
        """Largest |log ratio| allowed when the rollout is replayed before the first update.

        A tenth of the clip range, at most 1e-5 in float32 and 2e-3 in half precision.
        """
        return min(self.config.clip(sampler) / 10, 1e-5 if dtype == torch.float32 else 2e-3)

    def judge(self, features: int, num_steps: int, seed: int, device: torch.device) -> ValueNetwork:
        """The critic of `transitions`, made for so many features of a transition where there is none yet."""
        raise NotImplementedError


class SampleMethod(Method[C]):
    """A method on finished samples, noised again; with `members` on given pairs or labelled images."""

    needs = "samples"
    shared_eps: bool = False
    """Whether a prompt's samples share their noise at each time."""
    keeps_old: bool = False
    """Whether the loss takes `old` of the behaviour policy."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Deterministic steps."""
        return deterministic(schedule)

    def times(self, schedule: Schedule, ids: Sequence[SampleId], iteration: int, seed: int) -> Times:
        """Training times of B samples, [B, T]."""
        raise NotImplementedError

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """The value that the loss compares with, [M] float64, under the weights that are in the network."""
        raise NotImplementedError

    def measured(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """The values whose means the loss takes, [M, K] float64, under the policy before the update."""
        raise NotImplementedError


class NoiseMethod(Method[C]):
    """A method on the initial noise, whose distribution it learns for each training prompt; the network is frozen."""

    needs = "noise"
    train_std: bool = True
    """False learns the means alone."""
    value: ValueConfig | None = None
    """Options of the value network V; None: there is none."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Deterministic steps."""
        return deterministic(schedule)

    def calibrated(self, credit: Advantages, numbers: Tensor, weights: NoiseWeights) -> tuple[Tensor, float | None]:
        """(advantages [P, G] by the laws `numbers` [P] that drew the samples, V's mean squared error)."""
        return credit.values.squeeze(2), None

    def log_prob(self, latents: Tensor, numbers: Tensor, weights: NoiseWeights) -> Tensor:
        """Log-prob of latents [M, ...] under the laws `numbers` [M] as they are now, [M] float64."""
        raise NotImplementedError
