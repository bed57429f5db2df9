"""What spans several components of a configuration, refused before a model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from flowrl.diffusion.plan import StepPlan
from flowrl.models.base import ModelAdapter
from flowrl.rollout.outputs import is_cfg
from flowrl.samplers.base import takes_vp
from flowrl.scoring.entries import check_plans


def check(resolved: Resolved) -> None:
    """Refuse combinations that no single component can judge.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    _check_source(resolved)
    _check_rewards(resolved)
    _check_credit(resolved)
    _check_exploration(resolved)
    if resolved.algorithm.build().needs == "edges":
        _check_guidance(resolved)
        _check_steps(resolved)
        _check_transitions(resolved)
        _check_method(resolved)
        _check_trees(resolved)
    elif resolved.algorithm.build().needs == "samples":
        _check_method(resolved)
        _check_samples(resolved)
    else:
        _check_method(resolved)
        _check_noise(resolved)


def check_model(resolved: Resolved, adapter: ModelAdapter | None) -> list[str]:
    """What should be known of a checkpoint distilled to few steps; nothing of others. `adapter` None: not known yet.

    Raises:
        ConfigError: the KL's divisor is not for its process, a guidance scale changes nothing, or a distilled
            checkpoint does not take it.
    """
    if adapter is None:
        return []
    _method_checks(resolved, lambda: resolved.algorithm.config.check_process(adapter.process))
    how, run, method = adapter.distilled, resolved.run, resolved.algorithm
    scales = [("rollout.guidance_scale", run.rollout.guidance_scale), ("eval.guidance_scale", run.eval.guidance_scale)]
    scales.append(("algorithm.guidance_scale", method.config.guidance_scale))
    scales += [(f"eval.best_guidance.{number}", scale) for number, scale in enumerate(run.eval.best_guidance)]
    if is_cfg(adapter):
        _check_below(scales, adapter.unguided, adapter.kind)
    if not how:
        return []
    for key, scale in scales:
        try:
            if scale is not None:
                adapter.check_guidance(scale)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    notes = [f"the model is distilled {how}: made for 1 to 8 steps; evaluations take its deterministic steps"]
    if resolved.model.config.distilled is None:
        notes[0] += "; if it is not, set model.distilled=none"
    if method.build().needs == "samples":
        notes.append(
            f"{method.name} fits the network to re-noised samples, which pulls a distilled one towards blurred means; "
            "methods with log-probs (flow_grpo with rollout.sampler ddim or cps) do not"
        )
    return notes


def _check_below(scales: list[tuple[str, float | None]], none: float, kind: str) -> None:
    """Refuse guidance below the scale `none`, from which on a pipeline of class `kind` guides."""
    for key, scale in scales:
        if scale is not None and scale < none:
            raise ConfigError(
                f"{key}={scale:g} changes nothing: {kind} guides above {none:g} only; set it to {none:g}, which is no "
                "guidance, or above"
            )


def check_trained(resolved: Resolved, plan: StepPlan) -> None:
    """What the number of trained steps does not allow, known once the model's grid is.

    Raises:
        ConfigError: naming the key.
    """
    samples = resolved.run.samples_per_iteration
    _method_checks(resolved, lambda: resolved.algorithm.config.check_trained(samples, len(plan.train)))


def _check_source(resolved: Resolved) -> None:
    """Where the samples come from, and what has no meaning then."""
    run, name = resolved.run, resolved.algorithm.name
    if not resolved.members:
        if run.data.pairs is not None:
            raise ConfigError(
                f"data.pairs.path={run.data.pairs.path!r}: {name} draws its samples and credits them by rewards; give "
                "data.prompts and rewards, or use a method that learns from pairs, such as diffusion_dpo"
            )
        if not run.rewards:
            raise ConfigError("rewards is empty: give at least one, such as [{name: jpeg}]")
        if all(plan.entry.weight == 0 for plan in resolved.rewards):
            raise ConfigError("rewards: every weight is 0, so there is nothing to train on; give one a weight")
        return
    if run.data.pairs is None:
        raise ConfigError(
            f"data.pairs.path is required: {name} learns from given pictures; give a preference set in place of "
            "data.prompts (docs/preferences.md)"
        )
    if run.rewards:
        raise ConfigError(
            f"rewards: {name} learns from pairs and credits nothing by rewards; move them to eval.rewards"
        )
    if run.eval.best_guidance and not run.eval.rewards:
        raise ConfigError("eval.best_guidance: there is no reward to compare by; give eval.rewards, or leave it out")
    if run.eval.rewards and run.data.eval_prompts is None:
        raise ConfigError("eval.rewards: there are no prompts to draw pictures for; give data.eval_prompts")
    if run.data.pairs.eval is not None and not resolved.algorithm.build().prefers:
        raise ConfigError(f"data.pairs.eval: {name} prefers no picture to another; leave it out")
    for item in dataclasses.fields(run.rollout):
        value = getattr(run.rollout, item.name)
        if item.name in ("prompts_per_iteration", "group_size", "exploration") and value != item.default:
            raise ConfigError(
                f"rollout.{item.name}={value}: the slots of {name} are filled from the pairs; leave it out, and set "
                "data.pairs.per_iteration"
            )


def _check_rewards(resolved: Resolved) -> None:
    """Several entries may share a component, but one that says the same twice is a slip."""
    plans = [(f"rewards.{i}", plan) for i, plan in enumerate(resolved.rewards)]
    plans += [(f"eval.rewards.{i}", plan) for i, plan in enumerate(resolved.eval_rewards)]
    for place, (key, plan) in enumerate(plans):
        for earlier, other in plans[:place]:
            if plan.entry == other.entry and plan.same_component(other):
                why = "training rewards are evaluated anyway" if key.startswith("eval") else "raise its weight instead"
                raise ConfigError(f"{key} repeats {earlier} ({plan.name}): name each value once; {why}")
    check_plans(plans)


def _check_guidance(resolved: Resolved) -> None:
    wanted = resolved.algorithm.config.guidance_scale
    given = resolved.run.rollout.guidance_scale
    if wanted is not None and wanted != given:
        raise ConfigError(
            f"algorithm.guidance_scale={wanted} differs from rollout.guidance_scale={given}: the ratio of a method "
            "with log-probs needs the same; set both alike, or leave algorithm.guidance_scale out"
        )


def _check_credit(resolved: Resolved) -> None:
    """The method's way to compare samples against the size of a group."""
    try:
        resolved.algorithm.config.check_group(resolved.group_size)
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None


def _check_steps(resolved: Resolved) -> None:
    run, sampler = resolved.run, resolved.sampler.build()
    steps, trained = run.rollout.num_inference_steps, resolved.algorithm.config.sde_steps
    # Flows end at clean data. Where a noise-prediction model's last step ends is known once its scheduler is.
    flow = not takes_vp(sampler)
    if steps < 1 + flow:
        raise ConfigError(
            f"rollout.num_inference_steps={steps}: at least 2, since a flow's last step ends at clean data, where no "
            "noise is left to be scored"
        )
    if trained is not None and max(trained) > steps - 1 - flow:
        raise ConfigError(
            f"algorithm.sde_steps={trained}: with rollout.num_inference_steps={steps} "
            f"the last trainable step is {steps - 1 - flow}"
        )
    if sampler.default_noise_level() == 0:
        raise ConfigError(
            f"rollout.sampler={run.rollout.sampler}: this sampler is deterministic, its steps have no log-prob; "
            "use flow_sde with noise_level above 0"
        )


def _check_trees(resolved: Resolved) -> None:
    """The samples of a prompt are the leaves of whole trees, where a method has trees."""
    config, rollout = resolved.algorithm.config, resolved.run.rollout
    leaves, least = config.leaves(rollout.num_inference_steps), config.least_trees
    if rollout.group_size % leaves:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size}: the samples of a prompt are the leaves of whole trees, and one "
            f"of {resolved.algorithm.name} has {leaves} here; use a multiple of {leaves}"
        )
    if rollout.group_size < least * leaves:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size}: {resolved.algorithm.name} compares the trees of a prompt, and "
            f"one has {leaves} leaves here; raise it to at least {least * leaves}"
        )
    trees, updates = resolved.slots * resolved.group_size // leaves, resolved.run.optim.updates_per_iteration
    if leaves > 1 and trees % updates:
        valid = [n for n in range(1, trees + 1) if trees % n == 0]
        near = sorted(sorted(valid, key=lambda n: abs(n - updates))[:3])
        raise ConfigError(
            f"optim.updates_per_iteration={updates} does not divide the {trees} trees of an iteration, which an update "
            f"takes whole ({resolved.slots} prompts x {rollout.group_size} samples in trees of {leaves}); nearest "
            f"values that do: {', '.join(map(str, near))}"
        )


def _check_transitions(resolved: Resolved) -> None:
    if resolved.algorithm.build().transitions is not None and resolved.model.config.shard:
        raise ConfigError(
            f"model.shard=true: a network that is split needs its processes in step, and the "
            f"transitions that {resolved.algorithm.name} remembers are shared out unevenly; set it to false"
        )


def _check_exploration(resolved: Resolved) -> None:
    run = resolved.run
    options = run.rollout.exploration
    if options is None:
        return
    if resolved.algorithm.build().needs != "samples":
        raise ConfigError(
            f"rollout.exploration: {resolved.algorithm.name} compares all samples of a prompt with their mean, which "
            "choosing the extremes would shift; use a method on finished samples, such as diffusion_nft, or set it to "
            "null"
        )
    model = resolved.model.config
    few_bits = model.memory.quantize is not None or model.memory.layerwise_casting is not None
    if options.network != "policy" and (model.shard or few_bits):
        key = "model.shard" if model.shard else "model.memory"
        raise ConfigError(
            f"rollout.exploration.network={options.network}: weights that {key} splits or stores in few bits have no "
            "plain copy; use network=policy, or leave that out"
        )
    try:
        options.check_group(run.rollout.group_size)
    except ValueError as error:
        raise ConfigError(f"rollout.exploration.{error}") from None


def _check_samples(resolved: Resolved) -> None:
    """What methods on finished samples cannot use, and the forwards that some must hold whole."""
    run, algorithm = resolved.run, resolved.algorithm.build()
    if algorithm.unit == "group" and run.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size=1: the loss of {resolved.algorithm.name} compares the samples of a prompt; raise it "
            "to at least 2"
        )
    if run.rollout.shared_noise:
        raise ConfigError(
            f"rollout.shared_noise=true: the samples of {resolved.algorithm.name} differ by their initial noise; "
            "set it to false"
        )
    if run.rollout.sampler is not None:
        raise ConfigError(
            f"rollout.sampler={run.rollout.sampler}: {resolved.algorithm.name} scores no transition, so it takes no "
            "sampler; set it to null, and choose algorithm.solver"
        )
    terms = algorithm.config.terms(run.rollout.num_inference_steps)
    taken = algorithm.taken(resolved.group_size)
    whole = {"term": 1, "sample": terms, "group": taken, "prompt": taken * terms}[algorithm.unit]
    if whole > run.optim.batch_size:
        what = {"sample": "all times of a sample", "group": "all samples of a prompt"}.get(
            algorithm.unit, "all samples of a prompt at all their times"
        )
        raise ConfigError(
            f"optim.batch_size={run.optim.batch_size}: a forward of {resolved.algorithm.name} must hold {what}, "
            f"{whole} rows; raise it to at least {whole} (model.gradient_checkpointing=true saves memory)"
        )


def _check_noise(resolved: Resolved) -> None:
    """What has no meaning for a method on the initial noise, whose network is frozen."""
    run, model, name = resolved.run, resolved.model.config, resolved.algorithm.name
    if run.rollout.shared_noise:
        raise ConfigError(
            f"rollout.shared_noise=true: the samples of {name} differ by their initial noise alone; set it to false"
        )
    if run.rollout.sampler is not None:
        raise ConfigError(
            f"rollout.sampler={run.rollout.sampler}: with the noise of a sampler's steps the initial noise would not "
            f"decide the picture, and {name} learns that alone; set it to null, and choose algorithm.solver"
        )
    for key in ("lora", "init_lora"):
        if getattr(model, key) is not None:
            raise ConfigError(f"model.{key}: {name} trains the initial noise, no weight of the network; set it to null")
    if model.shard:
        raise ConfigError(f"model.shard=true: {name} does not split the frozen network; set it to false")
    if run.optim.weight_decay:
        raise ConfigError(
            f"optim.weight_decay={run.optim.weight_decay} would shrink the stds towards 0; set it to 0: "
            "algorithm.prior_coef pulls to the base's noise"
        )


def _check_method(resolved: Resolved) -> None:
    """What the method itself asks of sampler, steps, samples and updates."""
    run, config = resolved.run, resolved.algorithm.config
    steps, updates = run.rollout.num_inference_steps, run.optim.updates_per_iteration
    _method_checks(resolved, lambda: config.check(resolved.sampler.build(), steps))
    _method_checks(resolved, lambda: config.check_geometry(run.samples_per_iteration, steps, updates))


def _method_checks(resolved: Resolved, check: Callable[[], None]) -> None:
    """Run a check of the method's options; its error names the method."""
    try:
        check()
    except ValueError as error:
        raise ConfigError(f"algorithm ({resolved.algorithm.name}): {error}") from None
