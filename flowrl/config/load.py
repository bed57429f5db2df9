"""From a YAML file or a run folder to a resolved run."""

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
from flowrl.core.strict import apply_override, find_config, load_tree, validate
from flowrl.scoring.entries import reward_plan


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override, make paths absolute (`flowrl/config/locate.py`) and validate; `resolve` validates components.

    `path` is a YAML file or a run folder, whose name and place then are the run's.

    Raises:
        ConfigError: one clear message, nothing loaded.
    """
    tree, file = load_tree(path), find_config(path)
    if file.name == "config.yaml" and (file.parent / "provenance.json").is_file():
        tree = as_it_was(tree, file)
    for word in overrides or []:
        apply_override(tree, word)
    refuse_old_names(tree)
    stand_ins(file.parent, tree)
    origin = origin_of(file, overrides)
    return placed(RunConfig, tree, lambda: validate(RunConfig, located(RunConfig, tree, origin), ""))


def resolve(run: RunConfig, *, offline: bool = False) -> Resolved:
    """Find every component and check what spans several of them.

    Args:
        run: the configuration.
        offline: ask no hub which adapter a model wants.

    Raises:
        ConfigError, ModelError: naming the key, the value and the remedy.
    """
    resolved = placed(RunConfig, to_tree(run), lambda: _found(run, offline=offline))
    check(resolved)
    return resolved


def _found(run: RunConfig, *, offline: bool) -> Resolved:
    """The run with its components, each by itself valid."""
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
