"""The interface of a kind of training data: what it asks of a run, and an iteration's share of each update.

A kind is a `Training` for the whole run and a `Work` for each iteration; `flowrl/training/kinds.py` chooses it for a
method.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms.base import Method, Networks
from flowrl.core.errors import ConfigError
from flowrl.core.rng import permutation
from flowrl.core.types import Condition, Identity
from flowrl.credit.advantages import Advantages
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import Process
from flowrl.diffusion.schedules import Schedule
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.weights.roles import Weights, trainable
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.options import RolloutConfig
from flowrl.rollout.policy import Evaluations
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler, step_std
from flowrl.scoring.gradient import RewardGradient
from flowrl.scoring.scorer import Scorer
from flowrl.training.metrics import Sums
from flowrl.training.microbatches import update_chunks
from flowrl.training.options import WEIGHT_DECAY, OptimConfig
from flowrl.training.world import World

Lookup = Callable[[Sequence[Identity]], Condition]
"""Conditions of P prompts, on the device."""


# ---- an iteration


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """The parts of a run that make the batches of its updates."""

    method: Any
    networks: Networks
    optim: OptimConfig
    rollout_batch_size: int
    """Samples per forward of the rollout."""
    seed: int
    world: World
    counter: Evaluations
    """Counts the network's evaluations."""
    schedule: Schedule
    """The model's own grid for the run's number of steps."""
    sharded: bool = False
    """Every forward is a step of all processes together."""
    climb: RewardGradient | None = None
    """The gradient of the rewards, for methods that climb it."""
    lookup: Lookup | None = None
    """Conditions of prompts, for methods that remember transitions."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration's data for its updates."""

    number: int
    """Keys the shares and the order inside them."""
    rollout: Rollout
    credit: Advantages
    """Credit of all samples of the iteration."""
    sums: Sums
    """Receives the metrics."""


class Work:
    """An iteration's data on this process, in shares of one update each."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        self.context, self.iteration = context, iteration
        self.shares: list[Any] = []

    def prepare(self) -> None:
        """Evaluate what the loss compares with, before the policy moves."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each share: edges, terms or samples."""
        return [len(share) for share in self.shares]

    def batches(self, number: int) -> Iterator[tuple[Any, bool]]:
        """Training forwards of a share, and whether they count."""
        raise NotImplementedError

    def chunks(self, numbers: Tensor, stratum: int) -> list[Tensor]:
        """Global numbers [n] of samples, trees or slots in disjoint sets, one for each update.

        `stratum` is the count of numbers of a prompt, which are dealt evenly; for slots, of all.
        """
        context = self.context
        updates, number = context.optim.updates_per_iteration, self.iteration.number
        return update_chunks(numbers, updates, context.seed, number, stratum=stratum)

    def order(self, count: int, purpose: str, share: int) -> Tensor:
        """Order of `count` rows of a share on this process, [count] int64."""
        context = self.context
        return permutation(count, context.seed, purpose, self.iteration.number, share, context.world.rank)


# ---- a run


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of a run that its training data depend on."""

    name: str
    """Name of the method."""
    model: ModelConfig
    sampler: Sampler
    rollout: RolloutConfig
    optim: OptimConfig
    slots: int
    """Prompts of an iteration."""
    group_size: int
    """Samples of a prompt."""
    seed: int

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.slots * self.group_size


@dataclass(frozen=True, slots=True)
class Demand:
    """The work and the memory that a sample of a chain asks of the updates."""

    rows: int
    """Rows in one pass: its trained steps or its times; 0 where the network is frozen."""
    share: float
    """Share of them that is trained where no group is dead: a method may select samples and steps."""
    latents: int
    """Latents that the rollout keeps in addition to the finished ones."""


@contextmanager
def checking(name: str, place: str = "algorithm") -> Iterator[None]:
    """A ValueError inside the block becomes a ConfigError that names the method and the place of its options."""
    try:
        yield
    except ValueError as error:
        raise ConfigError.about(error, f"{place} ({name}): ", place=place) from None


M = TypeVar("M", bound=Method)


class Training(Generic[M]):
    """A kind of training data, for a run of the method."""

    rows_are = "times"
    """Name of what `Demand.rows` counts, for tables."""
    frozen = False
    """True if the network is frozen, and no update evaluates it."""
    renoises = False
    """True if the network is fitted to finished samples, noised again."""
    own_prompts = False
    """True if the method learns about its training prompts alone, so that none of them are held out."""
    weight_decay = WEIGHT_DECAY
    """Where `optim.weight_decay` gives none."""
    climbs = False
    """True if the method takes the gradient of its rewards."""
    takes_sampler = False
    """True if the rollout's stochastic steps are those of `rollout.sampler`."""

    def __init__(self, method: M) -> None:
        self.method = method

    # ---- checks; all raise ConfigError that names the key, the value and the remedy

    def check(self, setting: Setting) -> None:
        """Refuse options that this kind cannot use; called before a model is loaded."""
        self._check_exploration(setting)
        offloaded = setting.model.memory.group_offload
        if self.climbs and "vae" in offloaded:
            raise ConfigError(
                f"model.memory.group_offload: the decoder's weights leave the device before its backward pass, which "
                f"{setting.name} takes",
                {"model.memory.group_offload": [part for part in offloaded if part != "vae"]},
            )
        rollout, config = setting.rollout, self.method.config
        drawn, steps = rollout.prompts_per_iteration * rollout.group_size, rollout.num_inference_steps
        with checking(setting.name):
            config.check(setting.sampler, steps)
            config.check_geometry(drawn, steps, setting.optim.updates_per_iteration)

    def _check_exploration(self, setting: Setting) -> None:
        """Refuse `rollout.exploration` where samples must not be chosen among candidates."""
        if setting.rollout.exploration is not None:
            raise ConfigError(
                f"rollout.exploration: {setting.name} compares all samples of a prompt with their mean, which "
                "choosing the extremes would shift, unlike a method on finished samples, such as diffusion_nft",
                {"rollout.exploration": None},
            )

    def check_prompts(self, train: Sequence[Prompt], evaluated: Sequence[Prompt]) -> None:
        """Refuse prompts that an evaluation could not use."""

    def check_grid(self, schedule: Schedule, seed: int) -> None:
        """Refuse a model's grid, with ValueError, that does not have the training times."""

    def first_plan(self, schedule: Schedule, sampler: Sampler, process: Process, seed: int) -> StepPlan:
        """The first iteration's plan on the model's grid. Raises ConfigError: none, or a trained step without noise."""
        try:
            plan = self.method.plan(schedule, sampler, 1, seed)
            if plan.train:
                steps = plan.steps(torch.tensor(plan.train), process)
                for k, std in zip(plan.train, step_std(sampler, process, steps).tolist(), strict=True):
                    if not std > 0:
                        raise ValueError(
                            f"the sampler leaves no noise at step {k} (std 0), so it has no log-prob; leave the step "
                            "out of algorithm.sde_steps, or use a sampler with noise there"
                        )
            self.check_grid(schedule, seed)
            return plan
        except ValueError as error:
            raise ConfigError.about(error, "the first iteration's steps: ", place="algorithm") from None

    # ---- work and memory

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        """The demand of one sample. Raises ValueError: the grid does not have the times."""
        raise NotImplementedError

    def guidance(self, adapter: ModelAdapter, rollout: float) -> float:
        """Guidance scale of the forwards in training, for a rollout with the scale `rollout`."""
        return rollout

    # ---- parts of a run

    def weights(
        self,
        adapter: ModelAdapter,
        options: ModelConfig,
        prompts: Sequence[Identity],
        seed: int,
        device: torch.device | str,
    ) -> Weights:
        """The trained weights: of the network, or on the device what is learned for each of the training prompts.

        Called before the adapter goes to its device.

        Raises ModelError: a LoRA that does not fit.
        """
        return trainable(adapter, options, seed)

    def learned_noise(self, weights: Weights) -> LearnedNoise | None:
        """The distribution of the initial noise, where it is learned."""
        return None

    def begin(self, weights: Weights, texts: Texts, train: Sequence[Prompt], seed: int) -> None:
        """Give the weights what depends on the texts of the training prompts."""

    def climb(self, scorer: Scorer, adapter: ModelAdapter) -> RewardGradient | None:
        """The gradient of the rewards, for a method that climbs it."""
        own = (vars(self.method.config).get(name) for name in ("decoded_at_once", "hinge", "frames"))
        return RewardGradient(scorer, adapter, *own) if self.climbs else None

    def recording(self, sampler: Sampler) -> Recording:
        """The data that the rollout keeps of its trained steps."""
        return Recording()

    # ---- updates

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        """The data of an iteration for its updates."""
        raise NotImplementedError

    def pass_gate(self, work: Work, dtype: torch.dtype) -> None:
        """Pass the parity gate (replay_gate.py), where the loss takes log-probs. Raises ParityError: with the step."""
