"""Reading a configuration from a YAML file or a run folder, and resolving its components."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.checks import check
from flowrl.config.components import component, model_component
from flowrl.config.locate import located, origin_of
from flowrl.config.places import placed
from flowrl.config.resolved import Resolved
from flowrl.config.retired import as_it_was, refuse_old_names
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core.contents import stand_ins
from flowrl.core.strict import find_config, load_tree, overridden, validate
from flowrl.scoring.entries import reward_plan


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """The configuration of a YAML file, a recipe or a run folder, with absolute paths; `resolve` checks its components.

    Args:
        path: file, name of a recipe, or run folder, which gives `name` and `output`.
        overrides: words such as "optim.learning_rate=1e-4".

    Raises:
        ConfigError: with the key, the value and the reason; nothing is loaded.
    """
    tree, file = load_tree(path), find_config(path)
    if file.name == "config.yaml" and (file.parent / "provenance.json").is_file():
        tree = as_it_was(tree, file)
    refuse_old_names(overridden(tree, overrides or []))
    stand_ins(file.parent, tree)
    origin = origin_of(file, overrides)
    return placed(RunConfig, tree, lambda: validate(RunConfig, located(RunConfig, tree, origin), ""))


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
