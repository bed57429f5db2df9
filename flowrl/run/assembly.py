"""Putting a run together: data, rewards, model, weights and method, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flowrl.algorithms.base import Method, Networks
from flowrl.config.checks import check_model, check_trained
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig
from flowrl.core.console import log
from flowrl.core.contents import Input, set_of
from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive
from flowrl.core.types import Condition, Identity
from flowrl.data.given_samples import Given, require_encoder
from flowrl.data.labels import LabelledSource
from flowrl.data.preferences import PreferenceSource
from flowrl.data.prompts import Prompt, PromptSource, identity, require_images
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.held_out import RunPrompts, run_prompts
from flowrl.models.base import ModelAdapter, packed_grid, torch_dtype
from flowrl.models.weights import Weights
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.saliency_maps import Mapper, mapper
from flowrl.run.inputs import made_with
from flowrl.samplers.base import Sampler, step_std
from flowrl.scoring.build import build_scorers, probe, require_modality
from flowrl.scoring.scorer import Scorer
from flowrl.training.base import Training, UpdateContext
from flowrl.training.divergence import remedy
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.optim import Optimizer
from flowrl.training.sharding import split
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run works with."""

    resolved: Resolved
    world: World
    source: PromptSource | PreferenceSource | LabelledSource
    prompts: RunPrompts
    scorer: Scorer | None
    """Rewards that are trained on; None for a method that learns from given pictures."""
    watched: Scorer | None
    """Those and the ones that are only looked at; None without any."""
    adapter: ModelAdapter
    weights: Weights
    dtype: torch.dtype
    texts: Texts
    algorithm: Method
    optimizer: Optimizer
    schedule: Schedule
    sampler: Sampler
    policy: Policy
    learner: Learner
    evaluator: Evaluator
    maps: Mapper | None
    """Where the advantages of a rollout's pictures count, for a method with `spatial`."""
    sharded: bool
    """The network is split over the processes, which then make every forward together."""
    learned: LearnedNoise | None
    """The law of the initial noise, for a method that learns it."""
    given: Given | None
    """The pictures that a run learns from, for a method on such."""

    def sets(self) -> list[Input]:
        """Contents of the sets that it reads, as they were scanned: pairs, and prompts of data sets."""
        result = [] if self.given is None else self.given.contents()
        data = self.resolved.run.data
        train = self.prompts.listed
        named = [("prompts", data.prompts, train), ("eval_prompts", data.eval_prompts, self.prompts.evaluated)]
        for key, source, prompts in named:
            if source is not None and source.startswith("hf:"):
                rows = [[prompt.text, prompt.metadata] for prompt in prompts]
                result.append(set_of(f"data.{key}", source, f"{len(rows)} prompts", {"rows": rows}))
        return result

    def introduction(self) -> str:
        """One line on what is about to run."""
        run, options = self.resolved.run, self.resolved.model.config
        data = self.prompts.describe()
        if self.given is not None:
            data = f"{len(self.given.records)} given {'pictures' if 'labelled' in self.given.members else 'pairs'}"
            data += f" and {len(self.prompts.evaluated)} held-out prompts"
        line = (
            f"{run.name}: {self.resolved.algorithm.name} on {options.path}, {self.weights.count:,} trained values "
            f"({self.weights.description}), {data}, "
            f"{self.world.size} process(es){', which share the network' if self.sharded else ''}"
        )
        if self.prompts.share is not None:
            line += f"\nheld out: {self.prompts.source}"
        if self.prompts.remark:
            line += f"\n{self.prompts.remark}"
        if self.prompts.evaluated and self.watched is None:
            line += "\neval.rewards is empty: evaluation draws pictures and scores nothing"
        return line


@dataclass(frozen=True, slots=True)
class _Data:
    """What a run learns from and is looked at with."""

    prompts: RunPrompts
    given: Given | None

    @property
    def train(self) -> list[Prompt]:
        """Empty where pictures are given."""
        return self.prompts.train

    @property
    def evaluated(self) -> list[Prompt]:
        return self.prompts.evaluated

    def texts(self, *, cache: bool) -> list[str | Prompt]:
        """All that is embedded ahead, if anything is."""
        return [*self.train, *self.evaluated, *(self.given.captions() if self.given is not None and cache else ())]


def assemble(resolved: Resolved, world: World, folder: Path | None, *, training: bool = True) -> Parts:
    """Load what the configuration names, cheapest first, and try the rewards before anything is trained.

    Evaluations write below `folder`, if there is one. `training` False leaves out what no evaluation needs: the
    backbone of saliency maps.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
    """
    config = resolved.run
    _require_samples(resolved, world)
    algorithm: Method = resolved.algorithm.build()
    kind = training_of(algorithm)
    data = _data(config, kind)
    scorer, watched = build_scorers(
        resolved.rewards, resolved.eval_rewards, data.prompts.listed, data.prompts.looked_up
    )
    adapter = _adapter(resolved, data, watched)
    weights = _weights(resolved, kind, adapter, data.train, world)
    learned = kind.learned_noise(weights)
    _try_out(data, scorer, watched, adapter)
    texts = Texts(adapter, data.texts(cache=config.data.caches_text), cache=config.data.caches_text)
    kind.begin(weights, texts, data.train, config.seed)
    for role in algorithm.roles:
        weights.snapshot(role)
    sampler, schedule = resolved.sampler.build(), adapter.schedule(config.rollout.num_inference_steps)
    policy = Policy(adapter, sampler, config.rollout.guidance_scale)
    check_trained(resolved, _require_plan(kind, sampler, schedule, adapter, config.seed))
    for note in check_model(resolved, adapter):
        log.warning("%s", note)
    _require_whole_groups(algorithm, resolved.slots, world)
    learner = _learner(resolved, kind, Networks(policy, weights), texts, schedule, world)
    return Parts(
        resolved=resolved,
        world=world,
        source=PromptSource(data.train, resolved.slots, config.seed) if data.given is None else data.given.source,
        prompts=data.prompts,
        scorer=scorer,
        watched=watched,
        adapter=adapter,
        weights=weights,
        dtype=torch_dtype(resolved.model.config.dtype),
        texts=texts,
        algorithm=algorithm,
        optimizer=learner.optimizer,
        schedule=schedule,
        sampler=sampler,
        policy=policy,
        learner=learner,
        evaluator=_evaluator(resolved, data, learner, texts, watched, folder, learned),
        maps=_maps(algorithm, adapter, world) if training else None,
        sharded=learner.context.sharded,
        learned=learned,
        given=data.given,
    )


def _try_out(data: _Data, scorer: Scorer | None, watched: Scorer | None, adapter: ModelAdapter) -> None:
    """Find out before anything is trained whether the rewards score, and the adapter takes given pictures."""
    probe(scorer, data.train[:2], adapter)
    probe(watched, data.evaluated[:2], adapter, known=scorer)
    if data.given is not None:
        require_encoder(adapter)


def _outputs(watched: Scorer | None) -> list[tuple[str, ...]]:
    """Of every entry of the rewards."""
    return [] if watched is None else [entry.reward.card.outputs for entry in watched.entries]


def _embedded(texts: Texts, prompts: Sequence[Identity]) -> Condition:
    """Conditions of prompts that an earlier iteration drew."""
    return texts.lookup([Prompt(text, images=images) for text, images in prompts])


def _data(config: RunConfig, kind: Training) -> _Data:
    """Prompts and pictures of a run, read before anything else."""
    prompts = run_prompts(config, kind.own_prompts)
    kind.check_prompts(prompts.train, prompts.evaluated)
    given = None if config.data.pairs is None else Given(config.data.pairs, kind.method, config.seed)
    return _Data(prompts, given)


def _adapter(resolved: Resolved, data: _Data, watched: Scorer | None) -> ModelAdapter:
    """The model, if rewards and prompts are of its kind."""
    adapter = resolved.model.build()
    for entry in () if watched is None else watched.distinct:
        require_modality(entry.name, entry.reward.card, videos=adapter.num_frames > 1)
    # Captions of pairs have no reference pictures.
    listed, (key, evaluated) = data.prompts.listed, data.prompts.looked_up
    first = listed[0] if data.given is None else Prompt("")
    require_images(listed or [first], adapter, "data.prompts" if data.given is None else "data.pairs", first)
    require_images(evaluated, adapter, key, first)
    return adapter


def _sharded(resolved: Resolved, world: World) -> bool:
    return resolved.model.config.shard and world.size > 1


def _weights(
    resolved: Resolved, kind: Training, adapter: ModelAdapter, train: Sequence[Prompt], world: World
) -> Weights:
    """What is trained, with the adapter on its device, its network split over the processes where that is asked for."""
    options, seed = resolved.model.config, derive(resolved.run.seed, "lora")
    weights = kind.weights(adapter, options, [identity(prompt) for prompt in train], seed, world.device)
    if _sharded(resolved, world):
        split(adapter, weights, world, torch_dtype(options.dtype))
    else:
        adapter.to(world.device)
    return weights


def _learner(
    resolved: Resolved, kind: Training, networks: Networks, texts: Texts, schedule: Schedule, world: World
) -> Learner:
    config = resolved.run
    updates = config.iterations * config.optim.updates_per_iteration * kind.method.passes
    # No gradient goes through a frozen network.
    scaled = resolved.model.config.dtype == "float16" and not kind.frozen
    context = UpdateContext(
        method=kind.method,
        networks=networks,
        optim=config.optim,
        rollout_batch_size=config.rollout.batch_size,
        seed=config.seed,
        world=world,
        counter=Evaluations(networks.policy.adapter.network),
        schedule=schedule,
        sharded=_sharded(resolved, world),
        lookup=partial(_embedded, texts),
    )
    return Learner(kind, context, Optimizer(networks.weights, config.optim, updates, loss_scaling=scaled, world=world))


def _maps(algorithm: Method, adapter: ModelAdapter, world: World) -> Mapper | None:
    spatial = algorithm.spatial
    if spatial is None:
        return None
    layout = {"grid": packed_grid(adapter), "channel_axis": adapter.channel_axis}
    return mapper(spatial, adapter.latent_shape(), world.device, **layout)


def _evaluator(
    resolved: Resolved,
    data: _Data,
    learner: Learner,
    texts: Texts,
    scorer: Scorer | None,
    folder: Path,
    learned: LearnedNoise | None,
) -> Evaluator:
    dtype, optim = resolved.model.config.dtype, learner.context.optim
    return Evaluator(
        adapter=learner.networks.policy.adapter,
        texts=texts,
        scorer=scorer,
        world=learner.world,
        folder=folder,
        prompts=tuple(data.evaluated),
        options=resolved.run.eval,
        sharded=learner.context.sharded,
        made_with=made_with(resolved, data.evaluated, _outputs(scorer)),
        learned=learned,
        remedy=lambda **known: remedy(dtype, optim, learner.grad_norm, **known),
    )


def _require_samples(resolved: Resolved, world: World) -> None:
    leaves = resolved.algorithm.config.leaves(resolved.run.rollout.num_inference_steps)
    samples = resolved.slots * resolved.group_size
    if samples // leaves < world.size:
        what = "data.pairs.per_iteration" if resolved.members else "rollout.prompts_per_iteration x rollout.group_size"
        raise ConfigError(
            f"{what} = {samples} samples{f' in trees of {leaves}' if leaves > 1 else ''} cannot keep {world.size} "
            "processes busy; raise one of them or start fewer processes"
        )


def _require_whole_groups(algorithm: Method, prompts: int, world: World) -> None:
    if algorithm.unit in ("group", "prompt") and prompts < world.size:
        key = "data.pairs.per_iteration" if algorithm.members else "rollout.prompts_per_iteration"
        raise ConfigError(
            f"{key}={prompts}: the loss compares all samples of a prompt, which must lie on "
            f"one of {world.size} processes; raise it to at least {world.size}, or start fewer processes"
        )


def _require_plan(kind: Training, sampler: Sampler, schedule: Schedule, adapter: ModelAdapter, seed: int) -> StepPlan:
    """The first plan: one that cannot be made or walked is the user's to mend, now rather than after the base
    evaluation."""
    try:
        plan = kind.method.plan(schedule, sampler, 1, seed)
        if plan.train:
            _require_noise(
                plan, step_std(sampler, adapter.process, plan.steps(torch.tensor(plan.train), adapter.process))
            )
        kind.check_grid(schedule, seed)
        return plan
    except ValueError as error:
        raise ConfigError(f"the first iteration's steps: {error}") from None


def _require_noise(plan: StepPlan, std: torch.Tensor) -> None:
    """Raise ValueError where a trained step has std 0, [trained steps]."""
    for k, value in zip(plan.train, std.tolist(), strict=True):
        if not value > 0:
            raise ValueError(
                f"the sampler's law leaves no noise at step {k} (std 0), so it has no log-prob; leave the step out of "
                "algorithm.sde_steps, or use a sampler with noise there"
            )
