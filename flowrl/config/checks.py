"""Checks over several components of a configuration, before a model is loaded."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from flowrl.config import few_steps
from flowrl.config.resolved import Resolved
from flowrl.config.watched import check_guard, unwatched
from flowrl.core.errors import ConfigError, Remedy
from flowrl.diffusion.plan import StepPlan
from flowrl.media import mp4
from flowrl.models.base import ModelAdapter
from flowrl.rollout.outputs import is_cfg
from flowrl.scoring.build import require_modality
from flowrl.scoring.entries import RewardPlan, check_plans
from flowrl.scoring.gradient import require_paths
from flowrl.training.base import checking


def check(resolved: Resolved) -> None:
    """Refuse combinations that no component can check alone. Raises ConfigError: with key, value and remedy."""
    _check_source(resolved)
    _check_priority(resolved)
    _check_anchor(resolved)
    _check_rewards(resolved)
    _check_modality(resolved)
    _check_spread(resolved)
    check_guard(resolved)
    try:
        resolved.algorithm.config.check_group(resolved.group_size)
    except ValueError as error:
        raise ConfigError.about(error, "algorithm.", place="algorithm") from None
    _check_optimizer(resolved)
    resolved.training.check(resolved.setting)


def _check_spread(resolved: Resolved) -> None:
    """Refuse credit by the spread of groups without a reward that measures it and is only looked at."""
    rule = resolved.algorithm.config.credit_rule()
    if rule is None or (spread := rule.spreading()) is None:
        return
    entries = [plan.entry for plan in resolved.rewards]
    entry = entries[spread.reward] if spread.reward < len(entries) else None
    output = f"diversity_{spread.by}"
    if entry is None or entry.weight or list(entry.outputs) != [output]:
        raise ConfigError(
            f"algorithm.advantages.spread.reward={spread.reward}: rewards.{spread.reward} must be an entry such as "
            f"{{name: diversity, near: 0.9, weight: 0, outputs: {{{output}: 1.0}}}}",
            {"algorithm.advantages.spread": None},
        )


def _check_optimizer(resolved: Resolved) -> None:
    """Refuse an optimizer whose state cannot be split, or that was not examined with learned noise."""
    name, config = resolved.run.optim.name, resolved.model.config
    if name == "adamw":
        return
    if config.shard and config.lora is None:
        raise ConfigError(
            f"optim.name={name} with model.shard=true and model.lora=null: its state is not kept by the rows that "
            "processes share out",
            [{"optim.name": "adamw"}, {"model.lora": {}}, {"model.shard": False}],
        )
    if resolved.training.frozen:
        raise ConfigError(
            f"optim.name={name}: {resolved.algorithm.name} trains small tensors of initial noise, which need adamw's "
            "moments",
            {"optim.name": "adamw"},
        )


def check_model(resolved: Resolved, adapter: ModelAdapter | None) -> list[str]:
    """Check the options against a model's adapter; None: it is not known yet.

    Returns:
        Notes of the method's options, about a method that nothing watches, about an average or a learning rate that the
        run never gets to, about rewards that play videos at another rate than the model, and about a checkpoint
        distilled to few steps.

    Raises ConfigError: videos that cannot be saved as asked, a KL divisor that does not fit the process, a guidance
    scale without an effect, one that a distilled checkpoint does not take, or a branch of guidance without gradient
    where updates have none.
    """
    notes = [*resolved.algorithm.config.notes, *unwatched(resolved)]
    if adapter is None:
        return notes
    _check_videos(resolved, adapter)
    _check_frames(resolved, adapter)
    with checking(resolved.algorithm.name):
        resolved.algorithm.config.check_process(adapter.process)
    run, scales = resolved.run, _scales(resolved)
    if is_cfg(adapter):
        reference = ("algorithm.reference_guidance", resolved.method.reference_guidance)
        for key, scale in (*scales, reference):
            if scale is not None and scale < adapter.unguided:
                raise ConfigError(
                    f"{key}={scale:g} changes nothing: {adapter.kind} guides above {adapter.unguided:g} only",
                    {key: adapter.unguided},
                )
    for key, scale in scales:
        if scale is not None and scale < 0:
            raise ConfigError(f"{key}={scale:g} must not be negative: {adapter.kind} was trained with none below 0")
    if run.eval.best_guidance and not adapter.takes_guidance:
        how = "" if adapter.distilled is None else f", which is distilled {adapter.distilled},"
        raise ConfigError(
            f"eval.best_guidance={run.eval.best_guidance}: the model{how} has no guidance to search for",
            {"eval.best_guidance": []},
        )
    _check_gradient(resolved, adapter)
    return (
        notes + _never_reached(resolved) + _other_rates(resolved, adapter) + few_steps.check(resolved, adapter, scales)
    )


def _scales(resolved: Resolved) -> list[tuple[str, float | None]]:
    """(key, guidance scale) of all that a run gives."""
    run, method = resolved.run, resolved.method
    scales = [("rollout.guidance_scale", run.rollout.guidance_scale), ("eval.guidance_scale", run.eval.guidance_scale)]
    scales.append(("algorithm.guidance_scale", method.guidance_scale))
    if "reference" in method.roles:
        scales.append(("algorithm.reference_guidance", method.reference_guidance))
    return scales + [(f"eval.best_guidance.{number}", scale) for number, scale in enumerate(run.eval.best_guidance)]


def _never_reached(resolved: Resolved) -> list[str]:
    """Notes where the run ends before its averaged weights or its learning rate get anywhere."""
    optim, ema, warmup = resolved.run.optim, resolved.run.optim.ema, resolved.run.optim.warmup_updates
    updates = resolved.run.iterations * optim.updates_per_iteration * resolved.method.passes
    if updates == 0:
        return []
    notes = []
    if ema is not None and updates < ema.start:
        key = f"optim.ema.{'every' if ema.first is None else 'first'}"
        notes.append(
            f"{key}={ema.start}: the run has {updates} updates, so its averaged weights stay the untrained ones, and "
            f"those are evaluated and saved; set {key} to {updates} or less, or optim.ema to null"
        )
    if updates < warmup:
        notes.append(
            f"optim.warmup_updates={warmup}: the run has {updates} updates, so its learning rate ends at "
            f"{optim.learning_rate * updates / warmup:.3g} and never gets to optim.learning_rate="
            f"{optim.learning_rate:g}; set optim.warmup_updates to {updates} or less"
        )
    return notes


def _other_rates(resolved: Resolved, adapter: ModelAdapter) -> list[str]:
    """Notes on rewards whose entry states another frame rate than that of the model's videos."""
    if adapter.num_frames == 1:
        return []
    notes = []
    for key, plans in (("rewards", resolved.rewards), ("eval.rewards", resolved.eval_rewards)):
        for number, plan in enumerate(plans):
            rate = getattr(plan.config, "fps", None)
            if not isinstance(rate, int | float):
                continue
            if rate in (adapter.fps, *(item.default for item in fields(plan.config) if item.name == "fps")):
                continue
            notes.append(
                f"{key}.{number}.fps={rate:g}: the reward {plan.name!r} takes the videos for so many frames "
                f"a second, and they are saved and shown at {adapter.fps:g} (model.fps); set it to {adapter.fps:g} "
                "unless that is meant"
            )
    return notes


def _check_videos(resolved: Resolved, adapter: ModelAdapter) -> None:
    """Refuse `eval.videos=mp4` where no such file can be written."""
    if resolved.run.eval.videos == "webp" or adapter.num_frames == 1:
        return
    mp4.library(f"eval.videos={resolved.run.eval.videos}")
    if adapter.height % 2 or adapter.width % 2:
        raise ConfigError(
            f"eval.videos=mp4: H.264 needs an even height and width, and the model makes {adapter.height} x "
            f"{adapter.width}",
            {"eval.videos": "webp"},
        )


def _check_frames(resolved: Resolved, adapter: ModelAdapter) -> None:
    """Refuse frames to be drawn that the model does not make, or where a reward scores whole videos."""
    count, there = vars(resolved.algorithm.config).get("frames"), adapter.num_frames
    whole = [plan.name for plan in resolved.rewards if plan.card is not None and plan.card.modality == "video"]
    if count is not None and (whole or there == 1 or count > there):
        why = f"{whole[0]} scores whole videos" if whole else f"the model makes {there}"
        raise ConfigError(f"algorithm.frames={count}: {why}", {"algorithm.frames": None})


def _check_gradient(resolved: Resolved, adapter: ModelAdapter) -> None:
    """Refuse `model.guidance_gradient=positive` where no update evaluates two branches."""
    if resolved.model.config.guidance_gradient == "both":
        return
    scale = resolved.training.guidance(adapter, resolved.run.rollout.guidance_scale)
    if resolved.training.frozen or adapter.branches(scale) == 1:
        reason = "trains no network" if resolved.training.frozen else f"is without it (guidance scale {scale:g})"
        raise ConfigError(
            f"model.guidance_gradient=positive takes the gradient of one branch of classifier-free guidance, and "
            f"training with {resolved.algorithm.name} {reason}",
            {"model.guidance_gradient": "both"},
        )


def check_trained(resolved: Resolved, plan: StepPlan, adapter: ModelAdapter) -> None:
    """Check the steps of an iteration, which the model's grid decides: the number of trained ones, and those of a model
    that is distilled on its own.

    Raises ConfigError: with the key that does not fit it.
    """
    few_steps.check_plan(resolved, plan, adapter)
    with checking(resolved.algorithm.name):
        resolved.algorithm.config.check_trained(resolved.run.samples_per_iteration, plan.trained)
    if resolved.fitting is not None:
        with checking("sft", "data.anchor"):
            resolved.fitting.check_grid(plan.schedule, resolved.run.seed)


def _check_source(resolved: Resolved) -> None:
    """Refuse options that have no meaning for the source of the samples: prompts or given pairs."""
    run, name = resolved.run, resolved.algorithm.name
    if not resolved.members:
        if run.data.pairs is not None:
            raise ConfigError(
                f"data.pairs.path={run.data.pairs.path!r}: {name} draws its samples and credits them by rewards; give "
                "data.prompts and rewards, or use a method that learns from pairs, such as diffusion_dpo"
            )
        if not run.rewards and resolved.method.credits:
            raise ConfigError("rewards is empty: at least one is needed", {"rewards": [{"name": "jpeg"}]})
        if run.rewards and all(plan.entry.weight == 0 for plan in resolved.rewards):
            raise ConfigError("rewards: every weight is 0, so there is nothing to train on", {"rewards.0.weight": 1.0})
        _require_judge(resolved)
        return
    if run.data.pairs is None:
        raise ConfigError(
            f"data.pairs.path is required: {name} learns from given images; give a preference set in place of "
            "data.prompts (docs/preferences.md)"
        )
    if run.rewards:
        raise ConfigError(
            f"rewards: {name} learns from pairs and credits nothing by rewards; in eval.rewards they are looked at",
            {"rewards": []},
        )
    _require_judge(resolved)
    if run.eval.rewards and run.data.eval_prompts is None:
        raise ConfigError(
            "eval.rewards: there are no prompts in data.eval_prompts to sample images for", {"eval.rewards": []}
        )
    if run.data.pairs.eval is not None and not resolved.method.prefers:
        raise ConfigError(f"data.pairs.eval: {name} compares no images", Remedy(without="data.pairs.eval"))


def _require_judge(resolved: Resolved) -> None:
    """Refuse a search for the best guidance without a reward to compare by."""
    run = resolved.run
    if run.eval.best_guidance and not (run.rewards or run.eval.rewards):
        raise ConfigError(
            "eval.best_guidance: there is no reward to compare by in eval.rewards", {"eval.best_guidance": []}
        )


def _check_priority(resolved: Resolved) -> None:
    """Refuse a priority of prompts by what the method does not have."""
    by, size = resolved.run.data.priority and resolved.run.data.priority.by, resolved.group_size
    why = f"spread at rollout.group_size={size}" if by == "spread" and size < 2 else ""
    why = "advantages" if by == "ucb" and resolved.algorithm.config.credit_rule() is None else why
    why = "credit by rewards" if by and not resolved.method.credits else why
    why = "prompts to draw, nor rewards" if by and resolved.members else why
    if why:
        raise ConfigError(f"data.priority.by={by}: {resolved.algorithm.name} has no {why}", {"data.priority": None})


def _check_anchor(resolved: Resolved) -> None:
    """Refuse given images beside the prompts that no network is fitted to, or that are the run's own samples."""
    options, run, why = resolved.run.data.anchor, resolved.run, ""
    if options is None:
        if vars(resolved.algorithm.config).get("anchored"):
            raise ConfigError(
                f"data.anchor=null: {resolved.algorithm.name} is a step up a judge and a step on given images, summed; "
                "give it the path of some",
                {"algorithm.anchored": False},
            )
        return
    if resolved.training.frozen:
        why = f": {resolved.algorithm.name} trains no network, so none is fitted to the images"
    if Path(options.path.removeprefix("hf:")).resolve().is_relative_to(run.folder.resolve()):
        why = f".path={options.path!r} is in the run's folder: its own samples would hold the network where it has gone"
    if why:
        raise ConfigError(f"data.anchor{why}", {"data.anchor": None})


def _check_rewards(resolved: Resolved) -> None:
    """Refuse an entry that repeats another, and people where none are asked; several entries may share a component."""
    plans = [(f"rewards.{i}", plan) for i, plan in enumerate(resolved.rewards)]
    plans += [(f"eval.rewards.{i}", plan) for i, plan in enumerate(resolved.eval_rewards)]
    for place, (key, plan) in enumerate(plans):
        for earlier, other in plans[:place]:
            if plan.entry == other.entry and plan.same_component(other):
                why = "training rewards are evaluated anyway" if key.startswith("eval") else "raise its weight instead"
                raise ConfigError(f"{key} repeats {earlier} ({plan.name}): name each value once; {why}")
    check_plans(plans, latents=True)
    _check_renewal(resolved, plans)
    offered = [name for plan in resolved.rewards if plan.on_latents for name in plan.outputs]
    for key in ("step_values", "tilt"):
        wanted = vars(resolved.algorithm.config).get(key)
        if wanted is not None and wanted.output not in offered:
            raise ConfigError(
                f"algorithm.{key}.output={wanted.output}: it is no output of an entry of `rewards` that judges "
                f"latents; there are {', '.join(offered) or 'none'}",
                {f"algorithm.{key}": None},
            )
    if resolved.training.climbs:
        # Options may change what a card declares: without `card_of` that is known when the reward is built.
        late = [{"build", "card_of"} & vars(plan.module).keys() == {"build"} for plan in resolved.rewards]
        known = [None if unknown else plan.card for plan, unknown in zip(resolved.rewards, late, strict=True)]
        require_paths(resolved.algorithm.name, resolved.rewards, known)
    seeing = [k for k, plan in enumerate(resolved.rewards) if plan.entry.weight != 0 and not plan.on_latents]
    if resolved.algorithm.config.judged_noisy and seeing:
        raise ConfigError(
            f"rewards.{seeing[0]}: {resolved.algorithm.name} climbs at noisy latents, and this reward looks at images",
            {"rewards": [{"name": "latent_judge"}]},
        )
    _check_people(resolved)


def _check_renewal(resolved: Resolved, plans: Sequence[tuple[str, RewardPlan]]) -> None:
    """Refuse a renewal of what is no judge of latents in training, or by an output that training does not score."""
    for key, plan in plans:
        renewal = plan.entry.renew
        if renewal is None:
            continue
        others = [other for other in resolved.rewards if not other.same_component(plan)]
        scored = [name for other in others for name in other.outputs]
        if key.startswith("eval") or not plan.on_latents:
            why = "evaluations train nothing" if key.startswith("eval") else f"{plan.name} judges no latents"
            raise ConfigError(f"{key}.renew: {why}", {f"{key}.renew": None})
        if renewal.by not in scored and all(other.outputs for other in others):
            raise ConfigError(
                f"{key}.renew.by={renewal.by}: no other entry of `rewards` has that output, by which samples are "
                f"labelled; there are {', '.join(scored) or 'none'}; weight 0 looks at one without training on it",
                remedies=[Remedy({f"{key}.renew.by": name}) for name in scored[:1]],
            )


def _check_people(resolved: Resolved) -> None:
    """Refuse what cannot be had of a reward that people judge."""
    for place, plan in enumerate(resolved.eval_rewards):
        if plan.by_people:
            raise ConfigError(
                f"eval.rewards.{place}: {plan.name} asks people about every sample, and evaluations do not wait for "
                "them; of a finished run people compare base and tuned with `flowrl vote`",
                Remedy(without=f"eval.rewards.{place}"),
            )
    people = next((plan for plan in resolved.rewards if plan.by_people), None)
    if people is None:
        return
    run, judged = resolved.run, len(resolved.eval_rewards) + sum(not plan.by_people for plan in resolved.rewards)
    if run.rollout.exploration is not None:
        raise ConfigError(
            f"rollout.exploration looks at more candidates than are trained on, and {people.name} would ask people "
            "about all of them",
            [{"rollout.exploration": None}, Remedy(without=f"rewards.{resolved.rewards.index(people)}")],
        )
    if resolved.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={resolved.group_size}: {people.name} compares the samples of a prompt",
            {"rollout.group_size": 2},
        )
    if run.eval.best_guidance and not judged:
        raise ConfigError(
            f"eval.best_guidance: evaluations do not ask people ({people.name}), so there is no reward to compare by "
            "in eval.rewards",
            {"eval.best_guidance": []},
        )


def _check_modality(resolved: Resolved) -> None:
    """Refuse rewards for the other kind of samples by their cards, before a model's or a reward's weights are loaded.

    Those without a card are tried on what the model makes, and so are all where a generic pipeline decides its frames.
    """
    frames = resolved.model.config.frames
    if frames == 1 and resolved.model.name == "generic":
        return
    for plan in (*resolved.rewards, *resolved.eval_rewards):
        if plan.card is not None:
            require_modality(plan.name, plan.card, videos=frames > 1)
