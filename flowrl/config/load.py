"""Reading a configuration from a YAML file or a run folder, and resolving its components."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowrl.config.checks import check
from flowrl.config.components import component, model_component
from flowrl.config.extends import KEY, load_layers
from flowrl.config.locate import located, origin_of
from flowrl.config.older import as_it_was
from flowrl.config.places import placed
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.core.strict import overridden, validate
from flowrl.data.contents import stand_ins
from flowrl.scoring.entries import reward_plan


def load_config(path: str | Path, overrides: list[str] | None = None, *, folder: Path | None = None) -> RunConfig:
    """The configuration of a YAML file, a recipe or a run folder, with absolute paths; `resolve` checks its components.

    A file that extends others is merged with them first, and its messages name the file that holds the key.

    Args:
        path: file, name of a recipe, or run folder, which gives `name` and `output`.
        overrides: words such as "optim.learning_rate=1e-4".
        folder: folder that relative paths of the file start from, for a text that will lie there; None: the file's.

    Raises:
        ConfigError: with the key, the value and the reason; nothing is loaded.
    """
    words = overrides or []
    if any(word.startswith(f"{KEY}=") for word in words):
        raise ConfigError(f"{KEY} stands in a file alone; give the file that it would name as CONFIG")
    layers = load_layers(path)
    tree, file = layers.tree, layers.files[0]
    if file.name == "config.yaml" and (file.parent / "provenance.json").is_file():
        tree = as_it_was(tree)
    with layers.named(words):
        overridden(tree, words)
        stand_ins(file.parent, tree)
        origin = origin_of(file, overrides)
        origin = origin if folder is None else replace(origin, folder=folder)
        run = placed(RunConfig, tree, lambda: validate(RunConfig, located(RunConfig, tree, origin), ""))
        if len(layers.files) > 1:
            placed(RunConfig, to_tree(run), lambda: _check_known(run))
    return run


def _check_known(run: RunConfig) -> None:
    """Validate the options of the built-in components, while it is known which file holds which."""
    parts = [("models", run.model, "model"), ("algorithms", run.algorithm, "algorithm")]
    for kind, options, where in (*parts, ("samplers", run.rollout.sampler or {}, "rollout.sampler")):
        if options.get("name") in registry.names(kind):
            component(kind, options, where)
    for where, entries in (("rewards", run.rewards), ("eval.rewards", run.eval.rewards)):
        for number, options in enumerate(entries):
            if options.get("name") in registry.names("rewards"):
                reward_plan(options, f"{where}.{number}")


def resolve(run: RunConfig, *, offline: bool = False) -> Resolved:
    """Load every component, validate its options, and check those that depend on each other.

    Args:
        run: the configuration.
        offline: read the hub's cache alone to choose a model's adapter.

    Raises:
        ConfigError, ModelError: with the key, the value and the remedy.
    """
    resolved = placed(RunConfig, to_tree(run), lambda: _with_components(run, offline=offline))
    check(resolved)
    return resolved


def _with_components(run: RunConfig, *, offline: bool) -> Resolved:
    """The run with its components, each of them valid by itself."""
    model = model_component(run.model, offline=offline)
    algorithm = component("algorithms", run.algorithm, "algorithm", "flow_grpo")
    return Resolved(
        run=run,
        model=model,
        sampler=component("samplers", run.rollout.sampler or {}, "rollout.sampler", algorithm.config.default_sampler),
        algorithm=algorithm,
        rewards=tuple(reward_plan(options, f"rewards.{i}") for i, options in enumerate(run.rewards)),
        eval_rewards=tuple(reward_plan(o, f"eval.rewards.{i}") for i, o in enumerate(run.eval.rewards)),
    )
