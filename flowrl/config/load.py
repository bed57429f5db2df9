"""Reading a configuration from a YAML file or a run folder, and resolving its components.

Faults of the file, of the fixed sections and of components' names are told before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.extends import KEY, load_layers
from flowrl.config.locate import Origin, located
from flowrl.config.places import placed
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core import registry
from flowrl.core.errors import ConfigError, UnknownName
from flowrl.core.files import is_mapping
from flowrl.core.strict import Options, load_tree, overridden, validate
from flowrl.data.contents import stand_ins

if TYPE_CHECKING:
    from flowrl.config.resolved import Resolved


def load_config(path: str | Path, overrides: list[str] | None = None, *, folder: Path | None = None) -> RunConfig:
    """The configuration of a YAML file, a recipe or a run folder, with absolute paths; `resolve` checks its components.

    A file that extends others is merged with them first, and its messages name the file that holds the key.

    Args:
        path: file, name of a recipe, or run folder, which gives `name` and `output`.
        overrides: words such as "optim.learning_rate=1e-4".
        folder: folder that relative paths of the file start from, for a text that will lie there; None: the file's.

    Raises ConfigError: with the key, the value and the reason; nothing is loaded.
    """
    words = overrides or []
    if any(word.startswith(f"{KEY}=") for word in words):
        raise ConfigError(f"{KEY} stands in a file alone; give the file that it would name as CONFIG")
    layers = load_layers(path)
    tree, file = layers.tree, layers.files[0]
    with layers.named(words):
        overridden(tree, words)
        stand_ins(file.parent, tree)
        _require_names(placed(tree, lambda: validate(RunConfig, tree, "")))
        keys = tuple(word.partition("=")[0] for word in words)
        holders = {key: holder.parent for key, holder in layers.holders.items() if holder != file}
        # The marks of components' paths stand in their Config, so from here on components are imported.
        tree = located(RunConfig, tree, Origin(folder or file.parent, keys, holders))
        run = validate(RunConfig, tree, "")
        if len(layers.files) > 1:
            placed(to_tree(run), lambda: _check_known(run))
    return run


def run_tree(folder: Path, *places: str) -> Options:
    """Plain data of a run folder's configuration, which has `model.path` and the keys `places`.

    Raises ConfigError: it is not a run folder, or the file is damaged.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} is not a run folder: there is no {file}")
    tree = load_tree(file)
    for place in ("model.path", *places):
        part: Any = tree
        for key in place.split("."):
            if not is_mapping(part) or key not in part:
                raise ConfigError(f"{file} is damaged: it has no {place}; restore the file that flowrl train wrote")
            part = part[key]
    return tree


def _parts(run: RunConfig) -> Iterator[tuple[str, str, Options]]:
    """(kind, place, options) of every component of a run."""
    yield "models", "model", run.model
    yield "algorithms", "algorithm", run.algorithm
    yield "samplers", "rollout.sampler", run.rollout.sampler or {}
    for where, entries in (("rewards", run.rewards), ("eval.rewards", run.eval.rewards)):
        yield from (("rewards", f"{where}.{number}", options) for number, options in enumerate(entries))


def _require_names(run: RunConfig) -> None:
    """Refuse names of components that do not exist; a file that stands there too is refused later, or is meant."""
    for kind, where, options in _parts(run):
        name = options.get("name")
        if isinstance(name, str) and (kind == "models" or options.get("path") is None):
            try:
                registry.require_known(kind, name)
            except UnknownName as error:
                raise ConfigError(f"{where}: {error}") from None


def _check_known(run: RunConfig) -> None:
    """Validate the options of the built-in components, while it is known which file holds which."""
    from flowrl.config.components import component
    from flowrl.scoring.entries import reward_plan

    for kind, where, options in _parts(run):
        if options.get("name") in registry.names(kind):
            if kind == "rewards":
                reward_plan(options, where)
            else:
                component(kind, options, where)


def resolve(run: RunConfig, *, offline: bool = False) -> Resolved:
    """Load every component, validate its options, and check those that depend on each other.

    Args:
        run: the configuration.
        offline: read the hub's cache alone to choose a model's adapter.

    Raises ConfigError, ModelError: with the key, the value and the remedy.
    """
    from flowrl.config.checks import check

    resolved = placed(to_tree(run), lambda: _with_components(run, offline=offline))
    check(resolved)
    return resolved


def _with_components(run: RunConfig, *, offline: bool) -> Resolved:
    """The run with its components, each of them valid by itself."""
    from flowrl.config.components import component, model_component
    from flowrl.config.few_steps import on_its_nodes
    from flowrl.config.resolved import Resolved
    from flowrl.scoring.entries import reward_plan

    model = model_component(run.model, offline=offline)
    algorithm = component("algorithms", run.algorithm, "algorithm", "flow_grpo")
    algorithm = on_its_nodes(algorithm, model, run.algorithm)
    resolved = Resolved(
        run=run,
        model=model,
        sampler=component("samplers", run.rollout.sampler or {}, "rollout.sampler", algorithm.config.default_sampler),
        algorithm=algorithm,
        rewards=tuple(reward_plan(options, f"rewards.{i}") for i, options in enumerate(run.rewards)),
        eval_rewards=tuple(reward_plan(o, f"eval.rewards.{i}") for i, o in enumerate(run.eval.rewards)),
    )
    if run.optim.weight_decay is None:  # written into the run's configuration, as what it was trained with
        optim = replace(run.optim, weight_decay=resolved.training.weight_decay)
        resolved = replace(resolved, run=replace(run, optim=optim))
    return resolved
