"""Putting a run together: data, rewards, model, weights and method, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.algorithms.base import Algorithm, Networks, NoiseAlgorithm
from flowrl.checks import check_distilled
from flowrl.components import RewardPlan
from flowrl.config import ConfigError, EvalConfig, Resolved, RunConfig
from flowrl.distributed import World
from flowrl.evaluate import Evaluator
from flowrl.initials import add_calibration, noise_weights, require_own_prompts
from flowrl.learned_noise import LearnedNoise, NoiseWeights
from flowrl.learner import Learner
from flowrl.metrics import log
from flowrl.models._savings import cast_frozen
from flowrl.models.base import ModelAdapter, ModelConfig, channel_axis, packed_grid, torch_dtype
from flowrl.models.weights import Weights, component_names
from flowrl.optim import Optimizer
from flowrl.plan import StepPlan
from flowrl.prompts import Prompt, PromptSource, Texts, require_pictures
from flowrl.reward import Card, RewardError, Scorer, WeightedReward, score_once
from flowrl.rng import derive
from flowrl.rollout import Policy
from flowrl.samplers.base import Sampler, step_std
from flowrl.schedules import Schedule
from flowrl.sharding import split
from flowrl.sources import Columns, load_prompts
from flowrl.spatial import Mapper, mapper
from flowrl.types import SampleId

PROBE_PX = 64
"""Side of a probe picture where the adapter does not say its own."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run works with."""

    resolved: Resolved
    world: World
    source: PromptSource
    held_out: tuple[Prompt, ...]
    scorer: Scorer
    """Rewards that are trained on."""
    watched: Scorer
    """Those and the ones that are only looked at."""
    adapter: ModelAdapter
    weights: Weights
    dtype: torch.dtype
    texts: Texts
    algorithm: Algorithm
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

    def introduction(self) -> str:
        """One line on what is about to run."""
        run, options = self.resolved.run, self.resolved.model.config
        line = (
            f"{run.name}: {self.resolved.algorithm.name} on {options.path}, {self.weights.count:,} trained values "
            f"({self.weights.description}), "
            f"{len(self.source.prompts)} train and {len(self.held_out)} held-out prompts, {self.world.size} process(es)"
            f"{', which share the network' if self.sharded else ''}"
        )
        if run.data.eval_prompts is None:
            line += "\ndata.eval_prompts is not set: evaluation uses the training prompts, which is no held-out number"
        return line


def assemble(resolved: Resolved, world: World, folder: Path, *, training: bool = True) -> Parts:
    """Load what the configuration names, cheapest first, and try the rewards before anything is trained.

    `training` False leaves out what no evaluation needs: the backbone of saliency maps.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
    """
    config, options = resolved.run, resolved.model.config
    _require_samples(config.samples_per_iteration, world)
    train, held_out = both_prompts(config)
    algorithm: Algorithm = resolved.algorithm.build()
    if algorithm.needs == "noise":
        require_own_prompts(train, held_out)
    both = (*resolved.rewards, *resolved.eval_rewards)
    require_metadata(train, held_out, resolved, [plan.card for plan in both])
    entries = build_rewards(both)
    require_metadata(train, held_out, resolved, [entry.reward.card for entry in entries])
    scorer, watched = build_scorer(entries[: len(resolved.rewards)]), build_scorer(entries)
    adapter = resolved.model.build()
    for entry in watched.distinct:
        require_modality(entry.name, entry.reward.card, clips=getattr(adapter, "num_frames", 1) > 1)
    require_pictures(train, adapter, "data.prompts", train[0])
    require_pictures(held_out, adapter, "data.eval_prompts", train[0])
    dtype, sharded = torch_dtype(options.dtype), options.shard and world.size > 1
    if algorithm.needs == "noise":
        weights = _noise(algorithm, adapter, options, world, train)
    else:
        weights = _weights(resolved, adapter, world, dtype if sharded else None)
    learned = weights.network if isinstance(weights, NoiseWeights) else None
    probe(scorer, train[:2], adapter)
    probe(watched, held_out[:2], adapter)
    texts = Texts(adapter, (*train, *held_out), cache=config.data.cache_text)
    if isinstance(weights, NoiseWeights):
        add_calibration(algorithm, weights, texts, train, config.seed)
    for role in algorithm.roles:
        weights.snapshot(role)
    updates = config.iterations * config.optim.updates_per_iteration * algorithm.passes
    scaled = dtype == torch.float16 and algorithm.needs != "noise"  # there no gradient goes through the network
    optimizer = Optimizer(weights, config.optim, updates, loss_scaling=scaled, world=world)
    sampler, schedule = resolved.sampler.build(), adapter.schedule(config.rollout.num_inference_steps)
    policy = Policy(adapter, sampler, config.rollout.guidance_scale)
    _require_plan(algorithm, sampler, schedule, adapter, config.seed)
    for note in check_distilled(resolved, adapter):
        log.warning("%s", note)
    _require_whole_groups(algorithm, config.rollout.prompts_per_iteration, world)
    maps = None
    spatial = getattr(algorithm, "spatial", None)
    if training and spatial is not None:
        layout = {"grid": packed_grid(adapter), "channel_axis": channel_axis(adapter)}
        maps = mapper(spatial, adapter.latent_shape(), world.device, **layout)
    return Parts(
        resolved=resolved,
        world=world,
        source=PromptSource(train, config.rollout.prompts_per_iteration, config.seed),
        held_out=tuple(held_out),
        scorer=scorer,
        watched=watched,
        adapter=adapter,
        weights=weights,
        dtype=dtype,
        texts=texts,
        algorithm=algorithm,
        optimizer=optimizer,
        schedule=schedule,
        sampler=sampler,
        policy=policy,
        learner=Learner(
            *(config, algorithm, Networks(policy, weights), optimizer, world, schedule),
            sharded=sharded,
            lookup=lambda prompts: texts.lookup([Prompt(text, pictures=pictures) for text, pictures in prompts]),
        ),
        evaluator=_evaluator(config.eval, adapter, texts, watched, world, folder, tuple(held_out), sharded, learned),
        maps=maps,
        sharded=sharded,
        learned=learned,
    )


def _weights(resolved: Resolved, adapter: ModelAdapter, world: World, split_at: torch.dtype | None) -> Weights:
    """The trainable weights, with the adapter on its device; split over the processes for forwards of that dtype."""
    options = resolved.model.config
    weights = Weights(adapter.network, options.lora, adapter.lora_targets, derive(resolved.run.seed, "lora"))
    if options.init_lora is not None:
        weights.load_lora(options.init_lora)
    # Before the device: weights that are to be small there never lie on it at their full size.
    cast_frozen(weights.components.values(), options)
    if split_at is None:
        adapter.to(world.device)
    else:
        split(adapter, weights, world, split_at)
    return weights


def _noise(
    algorithm: NoiseAlgorithm, adapter: ModelAdapter, options: ModelConfig, world: World, train: Sequence[Prompt]
) -> NoiseWeights:
    """The laws of the initial noise, with the adapter frozen on its device."""
    adapter.network.requires_grad_(False)
    cast_frozen(component_names(adapter.network).values(), options)
    adapter.to(world.device)
    return noise_weights(algorithm, train, adapter.latent_shape(), world.device)


def _evaluator(
    options: EvalConfig,
    adapter: ModelAdapter,
    texts: Texts,
    scorer: Scorer,
    world: World,
    folder: Path,
    prompts: tuple[Prompt, ...],
    sharded: bool,
    learned: LearnedNoise | None,
) -> Evaluator:
    return Evaluator(
        adapter=adapter,
        texts=texts,
        scorer=scorer,
        world=world,
        folder=folder,
        prompts=prompts,
        seed=derive(0, "evaluation"),
        samples_per_prompt=options.samples_per_prompt,
        batch_size=options.batch_size,
        save_images=options.save_images,
        sharded=sharded,
        learned=learned,
    )


def both_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, those of the evaluations): the training prompts again where none are set."""
    data = config.data
    columns = Columns(data.prompt_column, data.image_column, data.subset)
    train = load_prompts(data.prompts, "data.prompts", columns)[: data.max_prompts]
    held_out = train
    if data.eval_prompts is not None:
        held_out = load_prompts(data.eval_prompts, "data.eval_prompts", columns)
    return train, held_out[: data.max_eval_prompts]


def _require_samples(samples: int, world: World) -> None:
    if samples < world.size:
        raise ConfigError(
            f"rollout.prompts_per_iteration x rollout.group_size = {samples} samples cannot keep {world.size} "
            "processes busy; raise one of them or start fewer processes"
        )


def _require_whole_groups(algorithm: Algorithm, prompts: int, world: World) -> None:
    if getattr(algorithm, "unit", "term") == "group" and prompts < world.size:
        raise ConfigError(
            f"rollout.prompts_per_iteration={prompts}: the loss compares all samples of a prompt, which must lie on "
            f"one of {world.size} processes; raise it to at least {world.size}, or start fewer processes"
        )


def _require_plan(algorithm: Algorithm, sampler: Sampler, schedule: Schedule, adapter: ModelAdapter, seed: int) -> None:
    """A first plan that cannot be made or walked is the user's to mend, now rather than after the base evaluation."""
    try:
        plan = algorithm.plan(schedule, sampler, 1, seed)
        if plan.train:
            _require_noise(
                plan, step_std(sampler, adapter.process, plan.steps(torch.tensor(plan.train), adapter.process))
            )
            algorithm.kept_edges([SampleId(0, 0)], plan, 1, seed)
        if algorithm.needs == "samples":
            algorithm.times(schedule, [SampleId(0, 0)], 1, seed)
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


def build_rewards(plans: Sequence[RewardPlan]) -> list[WeightedReward]:
    """The entries in their order; those of one component with the same options share it, so its weights load once."""
    built: list[tuple[RewardPlan, WeightedReward]] = []
    for plan in plans:
        sibling = next((entry for earlier, entry in built if plan.same_component(earlier)), None)
        built.append((plan, plan.build(sibling)))
    return [entry for _, entry in built]


def build_scorer(entries: Sequence[WeightedReward], **options: Any) -> Scorer:
    """A scorer that tells the log of errors, unless `options` say otherwise.

    Raises:
        ConfigError: entries that do not go together, as only the built rewards show.
    """
    try:
        return Scorer(entries, **({"on_error": lambda text: log.warning("%s", text)} | options))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def probe_batch(count: int, height: int, width: int, num_frames: int) -> torch.Tensor:
    """Noise to try rewards on: pictures [count, 3, H, W], or clips [count, F, 3, H, W] where there are more frames."""
    frames = (num_frames,) if num_frames > 1 else ()
    return torch.rand(count, *frames, 3, height, width, generator=torch.Generator().manual_seed(0))


def require_metadata(
    train: Sequence[Prompt], held_out: Sequence[Prompt], resolved: Resolved, cards: Sequence[Card | None]
) -> None:
    """Refuse a prompt that a reward cannot judge: its record lacks a key, or the reward's `check_prompt` refuses it.

    Args:
        train: prompts that are trained on.
        held_out: prompts of the evaluations.
        resolved: whose rewards are asked.
        cards: those of the rewards, then of eval.rewards.

    Raises:
        ConfigError: naming the reward, the prompt and what is wrong with it.
    """
    plans, trained = (*resolved.rewards, *resolved.eval_rewards), len(resolved.rewards)
    for place, (plan, card) in enumerate(zip(plans, cards, strict=True)):
        needed = () if card is None else card.requires + (("images",) if card.modality == "edit" else ())
        check = getattr(plan.module, "check_prompt", None)
        for key, prompts in (("data.prompts", train if place < trained else ()), ("data.eval_prompts", held_out)):
            for number, prompt in enumerate(prompts, 1):
                lacking = [name for name in needed if name not in prompt.metadata]
                if lacking:
                    raise ConfigError(
                        f"{key}: prompt {number}, {prompt.text[:60]!r}, has no {lacking[0]!r}, which the reward "
                        f"{plan.name!r} needs; give it in every record of a .jsonl or data set, or leave the reward out"
                    )
                try:
                    if check is not None:
                        check(prompt.text, prompt.metadata)
                except RewardError as error:
                    raise ConfigError(f"{key}: prompt {number}, {prompt.text[:60]!r}: {error}") from None


def require_modality(name: str, card: Card, *, clips: bool) -> None:
    """Refuse a reward that cannot judge what the model makes.

    Raises:
        ConfigError: naming the reward and the remedy.
    """
    if card.modality == "video" and not clips:
        raise ConfigError(
            f"reward {name!r} judges clips, and the model makes pictures; leave it out, or use a video model with more "
            "than one frame"
        )
    if card.modality in ("image", "edit") and clips:
        raise ConfigError(
            f"reward {name!r} judges pictures, and the model makes clips; leave it out, or use a reward that "
            "`flowrl list rewards` shows for video or any"
        )


def probe(scorer: Scorer, prompts: Sequence[Prompt], adapter: ModelAdapter) -> None:
    """Score noise: a broken reward ends the run here; one that scores none of it is told of."""
    height, width = getattr(adapter, "height", PROBE_PX), getattr(adapter, "width", PROBE_PX)
    images = probe_batch(len(prompts), height, width, getattr(adapter, "num_frames", 1))
    given = f"{'clips' if images.ndim == 5 else 'pictures'} {list(images.shape)}"
    joined: dict[str, torch.Tensor] = {}
    for entry in scorer.distinct:
        try:
            joined |= score_once(entry, images, [p.text for p in prompts], [p.metadata for p in prompts])
        except RewardError as error:
            if images.ndim < 5:
                raise
            raise RewardError(f"{error} (the model makes clips: it was given {given})") from error
        except Exception as error:
            raise RewardError(
                f"reward {entry.name!r} fails on a probe batch of {given}: "
                f"{type(error).__name__}: {error}; nothing was trained"
            ) from error
    for entry in scorer.entries:
        if entry.training_value(joined).isnan().all():
            log.warning(
                "reward %r returned NaN for all of a probe batch of noise, %s: every sample that it cannot score "
                "is masked, and the run stops where that is more than half of them",
                entry.name,
                given,
            )
