"""Putting a run together: data, rewards, model, weights and method, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from flowrl.algorithms.base import Method, Networks
from flowrl.config.checks import check_model, check_trained
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError, Diverged, Remedy
from flowrl.core.rng import derive
from flowrl.core.types import Condition, Identity
from flowrl.data.contents import Input, set_of
from flowrl.data.given_samples import Given, require_encoder
from flowrl.data.labels import LabelledSource
from flowrl.data.preferences import PreferenceSource
from flowrl.data.prompts import Prompt, PromptSource, identity, require_images
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.evaluation import previews
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.held_out import RunPrompts, run_prompts
from flowrl.evaluation.previews import Previews
from flowrl.models.base import ModelAdapter, packed_grid, torch_dtype
from flowrl.models.memory.compiled import probe as probe_compiled
from flowrl.models.weights.roles import Weights
from flowrl.planning.parity import require_own_call
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.saliency_maps import Mapper, mapper
from flowrl.run.inputs import made_with
from flowrl.run.texts import embedded
from flowrl.samplers.base import Sampler, step_std
from flowrl.scoring.build import build_scorers, require_modality
from flowrl.scoring.probing import probe
from flowrl.scoring.scorer import Scorer
from flowrl.training import optimizers
from flowrl.training.base import Training, UpdateContext
from flowrl.training.divergence import remedy
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.optim import Optimizer
from flowrl.training.sampling import Sampling
from flowrl.training.sharding import split
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Data:
    """The data that a run learns from and is evaluated on."""

    prompts: RunPrompts
    source: PromptSource | PreferenceSource | LabelledSource
    given: Given | None
    """Images that the run learns from; None: the network draws its samples."""
    previews: tuple[Prompt, ...] = ()
    """The user's own prompts (`eval.preview_prompts`)."""

    def texts(self, *, cache: bool) -> list[str | Prompt]:
        """All that is embedded ahead, if anything is."""
        captions = self.given.captions() if self.given is not None and cache else ()
        return [*self.prompts.train, *self.prompts.evaluated, *captions]

    def describe(self) -> str:
        """Counts, in words."""
        if self.given is None:
            return self.prompts.describe()
        kind = "images" if "labelled" in self.given.members else "pairs"
        return f"{len(self.given.records)} given {kind} and {len(self.prompts.evaluated)} held-out prompts"


@dataclass(frozen=True, slots=True)
class Scorers:
    """The rewards at work."""

    trained: Scorer | None
    """Rewards that are trained on; None for a method that learns from given images."""
    watched: Scorer | None
    """Rewards that are trained on or only evaluated (`eval.rewards`); None without any."""


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a run."""

    resolved: Resolved
    data: Data
    scorers: Scorers
    sampling: Sampling
    learner: Learner
    """The method with its networks and their optimizer."""
    evaluator: Evaluator
    previews: Previews
    """Draws the user's own prompts."""
    maps: Mapper | None
    """Saliency maps of a rollout's images, for a method with `spatial`."""

    def sets(self) -> list[Input]:
        """Contents of the data sets of the run, as they were scanned: pairs, and prompts of data sets."""
        result = [] if self.data.given is None else self.data.given.contents()
        data, prompts = self.resolved.run.data, self.data.prompts
        named = [("prompts", data.prompts, prompts.listed), ("eval_prompts", data.eval_prompts, prompts.evaluated)]
        for key, source, listed in named:
            if source is not None and source.startswith("hf:"):
                rows = [[prompt.text, prompt.metadata] for prompt in listed]
                result.append(set_of(f"data.{key}", source, f"{len(rows)} prompts", {"rows": rows}))
        return result

    def introduction(self) -> str:
        """Method, model, data and processes of the run, in a few lines."""
        resolved, prompts, weights = self.resolved, self.data.prompts, self.learner.networks.weights
        line = (
            f"{resolved.run.name}: {resolved.algorithm.name} on {resolved.model.config.path}, "
            f"{weights.count:,} trained values ({weights.description}), {self.data.describe()}, "
            f"{self.learner.world.size} process(es){', which share the network' if self.sampling.sharded else ''}"
        )
        if prompts.share is not None:
            line += f"\nheld out: {prompts.source}"
        if prompts.remark:
            line += f"\n{prompts.remark}"
        if prompts.evaluated and self.scorers.watched is None:
            line += "\neval.rewards is empty: evaluation draws images and scores nothing"
        return line


def assemble(resolved: Resolved, world: World, folder: Path | None, *, training: bool = True) -> Parts:
    """Load what the configuration names, cheapest first, and try the rewards before anything is trained.

    Args:
        resolved: the configuration.
        world: the processes.
        folder: evaluations are written below it; None: nothing is written.
        training: False leaves out what no evaluation needs: the backbone of saliency maps.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
    """
    config = resolved.run
    _require_possible(resolved, world)
    method: Method = resolved.algorithm.build()
    kind = training_of(method)
    data = _data(resolved, kind)
    prompts = data.prompts
    scorers = Scorers(*build_scorers(resolved.rewards, resolved.eval_rewards, prompts.listed, prompts.looked_up))
    with working(f"loading the model {resolved.model.config.path}"):
        adapter = resolved.model.build()
    # Captions of pairs have no reference images.
    listed = ("data.prompts", prompts.listed) if data.given is None else ("data.pairs", [Prompt("")])
    require_fit(adapter, scorers.watched, listed, prompts.looked_up)
    previews.require_fit(data.previews, adapter, resolved.model.config)
    weights = _weights(resolved, kind, adapter, prompts.train, world)
    probe(scorers.trained, prompts.train[:2], adapter)
    probe(scorers.watched, prompts.evaluated[:2], adapter, known=scorers.trained)
    if data.given is not None:
        require_encoder(adapter)
    # In a table of their own: that of the run stays as it is without them.
    shown = Texts(adapter, data.previews, cache=True, free=False) if data.previews else None
    texts = embedded(resolved, adapter, data.texts(cache=config.data.caches_text), world)
    kind.begin(weights, texts, prompts.train, config.seed)
    for role in method.roles:
        weights.snapshot(role)
    if resolved.model.config.compile is not None:
        cond = texts.lookup(data.texts(cache=config.data.caches_text)[:1])
        _try_compiled(resolved, kind, adapter, cond, weights)
    sampling = sampling_of(resolved, adapter, texts, world)
    check_trained(resolved, _require_plan(kind, sampling.sampler, sampling.schedule, adapter, config.seed))
    for note in check_model(resolved, adapter):
        log.warning("%s", note)
    _require_whole_groups(method, resolved.slots, world)
    learner = _learner(resolved, kind, sampling, weights)
    advice = partial(_advice, resolved, learner)
    sampling = replace(sampling, learned=kind.learned_noise(weights), remedy=advice)
    previews.require_learned(data.previews, sampling.learned)
    evaluator = _evaluator(resolved, data, sampling, scorers.watched, folder)
    return Parts(
        resolved=resolved,
        data=data,
        scorers=scorers,
        sampling=sampling,
        learner=learner,
        evaluator=evaluator,
        previews=Previews(evaluator, data.previews, shown),
        maps=_maps(method, adapter, world) if training else None,
    )


def require_fit(adapter: ModelAdapter, scorer: Scorer | None, *prompts: tuple[str, Sequence[Prompt]]) -> None:
    """Refuse rewards and prompts, listed by their key, that are not of the model's kind.

    Raises:
        ConfigError: naming the reward or the prompt, and the remedy.
    """
    for entry in () if scorer is None else scorer.distinct:
        require_modality(entry.name, entry.reward.card, videos=adapter.num_frames > 1)
    first = prompts[0][1][0]
    for key, listed in prompts:
        require_images(listed, adapter, key, first)


def sampling_of(resolved: Resolved, adapter: ModelAdapter, texts: Texts, world: World) -> Sampling:
    """The parts that draw samples as the run's rollouts do."""
    rollout = resolved.run.rollout
    return Sampling(
        policy=Policy(adapter, resolved.sampler.build(), rollout.guidance_scale),
        schedule=adapter.schedule(rollout.num_inference_steps),
        texts=texts,
        counter=Evaluations(adapter.network),
        world=world,
        sharded=_sharded(resolved, world),
    )


def _advice(resolved: Resolved, learner: Learner, **known: bool) -> tuple[type[Diverged], str]:
    return remedy(resolved.model.config, resolved.run.optim, learner.grad_norm, **known)


def _embedded(texts: Texts, prompts: Sequence[Identity]) -> Condition:
    """Conditions of prompts that an earlier iteration drew."""
    return texts.lookup([Prompt(text, images=images) for text, images in prompts])


@working("reading the prompts and images")
def _data(resolved: Resolved, kind: Training) -> Data:
    """Prompts and images of a run, read before anything else."""
    config = resolved.run
    prompts = run_prompts(config, kind.own_prompts)
    kind.check_prompts(prompts.train, prompts.evaluated)
    own = previews.preview_prompts(config)
    if config.data.pairs is None:
        return Data(prompts, PromptSource(prompts.train, resolved.slots, config.seed), None, own)
    given = Given(config.data.pairs, kind.method, config.seed, resolved.model.config.frames)
    return Data(prompts, given.source, given, own)


def _sharded(resolved: Resolved, world: World) -> bool:
    return resolved.model.config.shard and world.size > 1


def _weights(
    resolved: Resolved, kind: Training, adapter: ModelAdapter, train: Sequence[Prompt], world: World
) -> Weights:
    """The trained weights; the adapter is then on its device, its network split where `model.shard` says so, and its
    prediction known to be that of its pipeline."""
    options, seed = resolved.model.config, derive(resolved.run.seed, "lora")
    weights = kind.weights(adapter, options, [identity(prompt) for prompt in train], seed, world.device)
    if _sharded(resolved, world):
        split(adapter, weights, world, torch_dtype(options.dtype))
    else:
        adapter.to(world.device)
    rollout = resolved.run.rollout.guidance_scale
    require_own_call(adapter, (rollout, kind.guidance(adapter, rollout)), world)
    return weights


@working("compiling the network")
def _try_compiled(resolved: Resolved, kind: Training, adapter: ModelAdapter, cond: Condition, weights: Weights) -> None:
    """A microbatch's forward and backward and a rollout's forward through compiled blocks: what cannot be compiled ends
    here, not in the first iteration."""
    run = resolved.run
    batch = run.rollout.batch_size if kind.frozen else run.optim.batch_size

    def rows(count: int) -> Condition:
        return cond.index(torch.zeros(count, dtype=torch.int64, device=cond.device))

    timesteps = adapter.schedule(run.rollout.num_inference_steps).timesteps[[0, -1]].unique().to(cond.device)
    trained = [] if kind.frozen else list(weights.parameters.values())
    probe_compiled(adapter, rows(batch), timesteps, kind.guidance(adapter, run.rollout.guidance_scale), trained)
    if resolved.drawn and not kind.frozen:
        probe_compiled(adapter, rows(run.rollout.batch_size), timesteps, run.rollout.guidance_scale, [])


def _learner(resolved: Resolved, kind: Training, sampling: Sampling, weights: Weights) -> Learner:
    config = resolved.run
    updates = config.iterations * config.optim.updates_per_iteration * kind.method.passes
    # No gradient goes through a frozen network.
    scaled = resolved.model.config.dtype == "float16" and not kind.frozen
    context = UpdateContext(
        method=kind.method,
        networks=Networks(sampling.policy, weights),
        optim=config.optim,
        rollout_batch_size=config.rollout.batch_size,
        seed=config.seed,
        world=sampling.world,
        counter=sampling.counter,
        schedule=sampling.schedule,
        sharded=sampling.sharded,
        lookup=partial(_embedded, sampling.texts),
    )
    optimizer = Optimizer(weights, config.optim, updates, loss_scaling=scaled, world=sampling.world)
    return Learner(kind, context, optimizer)


def _maps(method: Method, adapter: ModelAdapter, world: World) -> Mapper | None:
    if method.spatial is None:
        return None
    layout = {"grid": packed_grid(adapter), "channel_axis": adapter.channel_axis}
    return mapper(method.spatial, adapter.latent_shape(), world.device, **layout)


def _evaluator(
    resolved: Resolved, data: Data, sampling: Sampling, scorer: Scorer | None, folder: Path | None
) -> Evaluator:
    outputs = [] if scorer is None else [entry.reward.card.outputs for entry in scorer.entries]
    return Evaluator(
        sampling=sampling,
        scorer=scorer,
        folder=folder,
        prompts=tuple(data.prompts.evaluated),
        options=resolved.run.eval,
        made_with=made_with(resolved, data.prompts.evaluated, outputs),
    )


def _require_possible(resolved: Resolved, world: World) -> None:
    optimizers.require(resolved.run.optim.name, world.device)
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
            f"{key}={prompts}: the loss compares all samples of a prompt, which must be on "
            f"one of {world.size} processes",
            remedies=[Remedy({key: world.size})],
        )


def _require_plan(kind: Training, sampler: Sampler, schedule: Schedule, adapter: ModelAdapter, seed: int) -> StepPlan:
    """The plan of the first iteration; refused with ConfigError here, before the base evaluation takes its time."""
    try:
        plan = kind.method.plan(schedule, sampler, 1, seed)
        if plan.train:
            _require_noise(
                plan, step_std(sampler, adapter.process, plan.steps(torch.tensor(plan.train), adapter.process))
            )
        kind.check_grid(schedule, seed)
        return plan
    except ValueError as error:
        raise ConfigError.about(error, "the first iteration's steps: ", place="algorithm") from None


def _require_noise(plan: StepPlan, std: torch.Tensor) -> None:
    """Raise ValueError where a trained step has std 0, [trained steps]."""
    for k, value in zip(plan.train, std.tolist(), strict=True):
        if not value > 0:
            raise ValueError(
                f"the sampler leaves no noise at step {k} (std 0), so it has no log-prob; leave the step out of "
                "algorithm.sde_steps, or use a sampler with noise there"
            )
