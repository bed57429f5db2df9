"""The interface of a training method: its data, its plan, its advantage rule, its loss. The trainer does the rest.

A new method writes its plan, its credit rule and its loss; everything else has a default. Its file has a `Config`, made
of the classes of `_options.py`, and a `build(config)` that gives one of

    EdgeMethod     trains on the stochastic steps of a rollout and their log-probs
    SampleMethod   trains on finished samples, drawn or given as pairs and labels, that are noised again
    GradientMethod trains on the gradient of differentiable rewards along a rollout
    StateMethod    trains on the network's output at the latents of its own rollout, by no reward
    NoiseMethod    trains the distribution of the initial noise
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms._climbing import ClimbOptions, KlOptions
from flowrl.algorithms._credit import Rule, alike, by_steps, given_signs, leaf_advantages, plain_rewards
from flowrl.algorithms._options import EdgeOptions, Lag, NoiseOptions, Options, SampleOptions
from flowrl.core.registry import name_of
from flowrl.core.types import Edges, Identity, Member, SampleId, Unit
from flowrl.credit.advantages import Advantages, RuleConfig
from flowrl.credit.critic import Critic, CriticConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.credit.tree_credit import LeafRewards, propagated
from flowrl.diffusion.plan import StepPlan, kept_plan, solver_plan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import SolverName
from flowrl.diffusion.training_times import Times, draw
from flowrl.losses.batches import GradientBatch, LossOutput, Microbatch, NoisedBatch
from flowrl.losses.reward_gradients import Route, climbing, levers
from flowrl.models.weights.roles import Weights
from flowrl.models.weights.teachers import Teaching
from flowrl.rollout.learned_noise import NoiseWeights
from flowrl.rollout.outputs import Outputs, evaluate, is_cfg, training_guidance
from flowrl.rollout.policy import Networks as Networks
from flowrl.rollout.trajectories import Rollout
from flowrl.rollout.transitions import Transitions
from flowrl.samplers.base import LogProbForm, Sampler, StepDistribution

C = TypeVar("C", bound=Options)
G = TypeVar("G", bound=KlOptions)


class Method(Generic[C]):
    """A training method. Attributes and hooks are defaults; `plan`, `advantages` and `loss` are the method's own."""

    Config: ClassVar[type[Options]] = Options
    """The options of a method whose file defines no `Config`, by its kind; one that does extends it."""
    members: tuple[Member, ...] = ()
    """Origin of each sample of a slot; empty: the rollout draws all of them."""
    credits: bool = True
    """Whether rewards credit the samples that it draws; False: they are only watched, and may be none."""
    prefers: bool = False
    """Whether `preferred` tells how far the policy agrees with the data."""
    roles: tuple[str, ...] = ()
    """Snapshots of the weights that the method needs: "reference", "anchor", "old", ..."""
    behaviour: str = "policy"
    """The role whose weights draw the samples."""
    options: ClassVar[Sequence[str]] = (
        *("guidance_scale", "reference_guidance", "old_log_prob", "passes", "shift", "spatial"),
    )
    """The attributes that an option of the same name sets, where the method's `Config` has it."""
    passes: int = 1
    """Times that an iteration goes through its data."""
    guidance_scale: float | None = None
    """Guidance scale of the training forward; None: by that of the rollout."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """Source of the old log-probs."""
    reference_guidance: float | None = None
    """That of the role "reference" where guidance is CFG; None: the policy's."""
    feedback: tuple[str, ...] = ()
    """Names of loss metrics; their means over all processes are passed to `after_update`."""
    unit: Unit = "term"
    """The part of the data that one forward must hold whole."""
    centres: bool = False
    """Whether the loss takes the means of what is `measured`, in a pass of its own before each update."""
    spatial: SpatialConfig | None = None
    """Map by which advantages count over an image; None: a sample has one advantage."""
    shift: float = 1.0
    """Resolution shift of the grid that the plan presumes."""
    remembers: tuple[str, ...] = ()
    """Attributes with plain data for the checkpoint."""

    def __init__(self, config: C) -> None:
        self.config, self.rule = config, Rule(config.credit_rule() or RuleConfig(), vars(config).get("filter"))
        vars(self).update({name: value for name, value in vars(config).items() if name in self.options})

    @property
    def level(self) -> str:
        """How well the method is tested: `LEVEL` of its file."""
        return vars(sys.modules[type(self).__module__]).get("LEVEL", "experimental")

    @property
    def frozen(self) -> int:
        """Networks without gradients that a forward of an update is compared with."""
        return len(self.roles)

    @property
    def recompute(self) -> bool:
        """Whether old log-probs are evaluated once more at training geometry."""
        return self.old_log_prob == "recompute"

    def taken(self, group_size: int) -> int:
        """Samples of a group that take part in the updates, at most."""
        rule = self.rule.config.selection()
        return group_size if rule is None else rule.keep

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of this iteration, the same on every rank; `seed` is the run's, for windows drawn at random."""
        raise NotImplementedError

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """Credit of all samples, by the advantage rule unless the method has its own; computed once an iteration.

        With `spatial` unclipped, with its bound: the clip follows the map. Rewards are [R, P, G] with NaN for failures,
        the same on every process; weights [R]; `prompts` those of the P slots, for rules that remember them.
        """
        return self.rule(rewards, weights, prompts, clipped=self.spatial is None)

    def retired(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Prompts of the iteration that are no longer sampled, [P] bool."""
        return self.rule.retired(rewards, weights)

    def loss(self, batch: Any, networks: Networks) -> LossOutput:
        """Sum over the microbatch; the trainer divides by the global number of edges or terms."""
        raise NotImplementedError

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """Agreement of each term with the data's +1 and -1, [M] float64: positive where it agrees."""
        raise NotImplementedError

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        """Called after each optimizer step, the `updates`-th of the run, with the means of `feedback`."""

    def after_iteration(self, updates: int, weights: Weights) -> None:
        """Called after the last optimizer step of an iteration, the `updates`-th of the run."""

    def warning(self, row: Mapping[str, Any]) -> str | None:
        """What a row of metrics calls for, in words; None: nothing."""
        return None

    # ---- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain data that the method and its advantage rule remember."""
        return {name: vars(self)[name] for name in self.remembers} | self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint.

        Raises ValueError: the state is another method's, or names a role that there is not.
        """
        own = self.rule.load_state_dict(state)
        name = name_of(self)
        if set(own) != set(self.remembers):
            raise ValueError(
                f"{name} keeps {sorted(self.state_dict()) or 'no state'}, the checkpoint has {sorted(state)}"
            )
        if own.get("behaviour", "policy") not in ("policy", *self.roles):
            raise ValueError(f"{name} has the roles {self.roles}, the checkpoint behaviour={own['behaviour']!r}")
        vars(self).update(own)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that the method remembers."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the tensors of a checkpoint, where it has some; called after `load_state_dict`."""


class EdgeMethod(Method[C]):
    """A method on the stochastic steps of a rollout and their log-probs."""

    Config: ClassVar[type[Options]] = EdgeOptions
    options = (*Method.options, "sde_steps", "path_weight")
    columns: tuple[str, ...] = ()
    """Extra tensors that the rollout records for each edge."""
    transitions: Transitions | None = None
    """Transitions of this and earlier iterations, of which each update draws its own; None: an iteration trains its own
    steps, each once a pass."""
    critic: Critic | None = None
    """The network that expects the rewards of `transitions`."""
    adjoint: bool = False
    """Whether the loss takes the lean adjoint of the rewards after each edge (`training/adjoint_batches.py`)."""
    path_weight: float = 0.0
    """Weight of a leaf's log-prob where a tree's leaves are averaged; 0: all alike."""
    sde_steps: Sequence[int] | None = None
    """Steps that an option names; None: none does."""

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.roles = config.roles

    @property
    def weighs_paths(self) -> bool:
        """Whether credit needs the log-probs of a tree's paths, `Rollout.paths`."""
        return self.path_weight != 0

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Stochastic and trained where the tree of the iteration is, else at the steps that the options name."""
        tree = self.config.tree(len(schedule), iteration, seed)
        branching = None if tree is None else [k for k, taken in enumerate(tree.stochastic) if taken]
        steps = self.config.stochastic_steps(schedule, iteration, seed) if branching is None else branching
        return replace(window(schedule, sampler.default_noise_level(), steps), tree=tree)

    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        """Credit by edge from that of the samples, if the plan branches: the mean of the leaves after an edge."""
        steps = propagated(leaf_advantages(credit), leaves.tree, leaves.path_weights(self.path_weight))
        return by_steps(credit, steps, self.rule.config.clip)

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

    def make_critic(self, features: int, num_steps: int, seed: int, device: torch.device) -> Critic:
        """The critic of `transitions`, made for so many features of a transition where there is none yet."""
        raise NotImplementedError


class SampleMethod(Method[C]):
    """A method on finished samples, noised again; with `members` on given pairs or labelled images."""

    Config: ClassVar[type[Options]] = SampleOptions
    options = (*Method.options, "solver", "solver_noise")
    solver: SolverName = "ode"
    """Solver of the rollout."""
    solver_noise: float = 0.0
    """tau of the solver `sa`."""
    shared_times: Literal["sample", "group", "all"] = "sample"
    """The samples that share their training times: none, those of a prompt, all."""
    eps: Literal["sample", "group", "own"] = "sample"
    """Noise at each time: a sample's, its prompt's, or the initial noise that given samples were drawn from."""
    keeps_old: bool = False
    """Whether the loss takes `old` of the behaviour policy."""
    compared: tuple[str, ...] = ()
    """Roles whose outputs the loss takes next to the policy's."""
    lags: Mapping[str, Lag] = MappingProxyType({})
    """Roles that follow the policy after every iteration: role <- d role + (1 - d) policy."""
    graded: bool = False
    """Whether given pairs have their margin and 0 as rewards, not 1 and 0; ties are then pairs too."""
    refresh: tuple[str, int] | None = None
    """(role, n): the role becomes the policy after every n optimizer steps, once an iteration at most."""

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.refreshes = 0
        """Refreshes that were due so far."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are compared, that lag, or that draw the samples."""
        return tuple(dict.fromkeys(r for r in (*self.compared, *self.lags, self.behaviour) if r != "policy"))

    @property
    def frozen(self) -> int:
        return len(self.compared)

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of the solver alone."""
        return solver_plan(schedule, self.solver, self.solver_noise)

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """Credit by the advantage rule; of given images the signs of the data."""
        return given_signs(rewards, self.graded) if self.members else super().advantages(rewards, weights, prompts)

    def times(self, schedule: Schedule, ids: Sequence[SampleId], iteration: int, seed: int) -> Times:
        """Training times of B samples, [B, T]."""
        return draw(self.config.times_on(schedule), schedule, ids, (seed, iteration), shared=self.shared_times)

    def outputs(self, batch: NoisedBatch, networks: Networks, roles: Sequence[str] | None = None) -> Outputs:
        """The policy's outputs with gradients, and those of `roles`; None: of `compared`."""
        guidance = self.guidance(networks, self.compared if roles is None else roles)
        return evaluate(networks.policy.adapter, networks.weights, batch, guidance)

    def guidance(self, networks: Networks, roles: Sequence[str]) -> dict[str, float]:
        """Guidance scale of the policy and of each of `roles` in training."""
        policy, own = networks.policy, self.reference_guidance
        scale = training_guidance(policy.adapter, policy.guidance_scale, self.guidance_scale)
        scales = dict.fromkeys(("policy", *roles), scale)
        if "reference" in scales and own is not None and is_cfg(policy.adapter):
            scales["reference"] = own
        return scales

    def old(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """The value that the loss compares with, [M] float64, under the weights that are in the network."""
        raise NotImplementedError

    def measured(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        """The values whose means the loss takes, [M, K] float64, under the policy before the update."""
        raise NotImplementedError

    def after_iteration(self, updates: int, weights: Weights) -> None:
        """Move the roles that lag, and refresh the one that is due."""
        for role, lag in self.lags.items():
            weights.follow(role, lag.decay(updates))
        if self.refresh is not None:
            role, every = self.refresh
            if updates // every > self.refreshes:
                self.refreshes = updates // every
                weights.follow(role, 0.0)


class GradientMethod(Method[G]):
    """A method on the gradient of differentiable rewards, pulled back along the steps of a deterministic rollout."""

    Config: ClassVar[type[Options]] = ClimbOptions
    tau: float | None = None
    """A sample weighs 1 / sum over leaps of max(distance of their ends from where they land, tau); None: all alike."""
    predicts: bool = False
    """Whether rewards see the clean prediction at the end of the route, not the sample."""
    redrawn: int = 0
    """Times that a sample is noised again to the end of the route, and climbs from its prediction there."""

    @property
    def roles(self) -> tuple[str, ...]:
        return self.config.roles

    def route(self, reach: int, iteration: int, seed: int) -> Route:
        """The route of an iteration over the first `reach` steps, those that move the image; ValueError: too few."""
        raise NotImplementedError

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of the ODE; what the route needs is kept."""
        route = self.route(levers(schedule), iteration, seed)
        keep = {*route.trained, route.end, min(route.end + route.ahead, len(schedule) - 1)}.union(*route.leaps)
        return replace(solver_plan(schedule), keep=tuple(sorted(keep)))

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """The rewards themselves: nothing is compared."""
        return plain_rewards(rewards, weights)

    def loss(self, batch: GradientBatch, networks: Networks) -> LossOutput:
        place = batch.latents, batch.step, batch.cond
        output, reference = networks.policy.output(*place), None
        if self.roles:
            with torch.no_grad(), networks.weights.using("reference"):
                reference = networks.policy.output(*place)
        return climbing(output, batch, reference, self.config.kl.of, 1 / (1 + self.redrawn))


class StateMethod(Method[C]):
    """A method on the network's output at kept latents of its own rollout, with noise where the sampler has some."""

    credits = False
    teaching: Teaching = Teaching()

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of the sampler, all of them kept that it can take; those of the ODE where it has no noise."""
        return kept_plan(schedule, sampler.default_noise_level())

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """All samples alike, whatever the rewards say."""
        return alike(rewards)

    def steps(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor:
        """Steps of each of B samples at which it is trained, [B, N] int64, of those that the plan keeps."""
        return torch.tensor(plan.keep).expand(len(ids), -1)


class NoiseMethod(Method[C]):
    """A method on the initial noise, whose distribution it learns for each training prompt; the network is frozen."""

    Config: ClassVar[type[Options]] = NoiseOptions
    options = (*Method.options, "solver")
    solver: SolverName = "ode"
    """Solver of the rollout, deterministic."""
    train_std: bool = True
    """False learns the means alone."""
    critic: CriticConfig | None = None
    """Options of the critic V; None: there is none."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        """Steps of a deterministic solver."""
        return solver_plan(schedule, self.solver)

    def calibrated(self, credit: Advantages, numbers: Tensor, weights: NoiseWeights) -> tuple[Tensor, float | None]:
        """(advantages [P, G], V's mean squared error) for the noise distributions `numbers` [P] that drew."""
        return credit.values.squeeze(2), None

    def log_prob(self, latents: Tensor, numbers: Tensor, weights: NoiseWeights) -> Tensor:
        """Log-prob of latents [M, ...] under the noise distributions `numbers` [M] as they are now, [M] float64."""
        raise NotImplementedError
