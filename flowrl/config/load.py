"""Reading a configuration from a YAML file or a run folder, and resolving its components.

Faults of the file, of the fixed sections and of components' names are told before torch is imported.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.config.extends import KEY, load_layers
from flowrl.config.locate import Origin, located
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core import registry
from flowrl.core.errors import ConfigError, UnknownName
from flowrl.core.files import is_mapping
from flowrl.core.strict import Options, UnknownKey, dotted, load_tree, overridden, validate
from flowrl.data.contents import stand_ins
from flowrl.scoring.options import RewardEntry

if TYPE_CHECKING:
    from flowrl.config.resolved import Resolved

_Made = TypeVar("_Made")


def load_config(path: str | Path, overrides: list[str] | None = None, *, folder: Path | None = None) -> RunConfig:
    """The configuration of a YAML file, a recipe or a run folder, with absolute paths; `resolve` checks its components.

    A file that extends others is merged with them first, and its messages name the file that holds the key. `path` is a
    file, the name of a recipe, or a run folder, which gives `name` and `output`; `overrides` are words such as
    "optim.learning_rate=1e-4". `folder`: where relative paths of the file start, for a text that will lie there; None:
    the file's.

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


def resolve(run: RunConfig, *, offline: bool = False) -> "Resolved":
    """Load every component, validate its options, and check those that depend on each other. `offline` reads the hub's
    cache alone to choose a model's adapter.

    Raises ConfigError, ModelError: with the key, the value and the remedy.
    """
    from flowrl.config.checks import check

    resolved = placed(to_tree(run), lambda: _with_components(run, offline=offline))
    check(resolved)
    return resolved


def _with_components(run: RunConfig, *, offline: bool) -> "Resolved":
    """The run with its components, each of them valid by itself."""
    from flowrl.config.components import component, model_component
    from flowrl.config.few_steps import on_its_nodes
    from flowrl.config.resolved import Resolved
    from flowrl.scoring.entries import reward_plan

    model = model_component(run.model, offline=offline)
    algorithm = component("algorithms", run.algorithm, "algorithm", "flow_grpo")
    algorithm = on_its_nodes(algorithm, model, run.algorithm)
    anchor = None
    if run.data.anchor is not None:
        times = {"times": run.data.anchor.times}
        anchor = on_its_nodes(component("algorithms", times, "data.anchor", "sft"), model, times)
    resolved = Resolved(
        run=run,
        model=model,
        sampler=component("samplers", run.rollout.sampler or {}, "rollout.sampler", algorithm.config.default_sampler),
        algorithm=algorithm,
        rewards=tuple(reward_plan(options, f"rewards.{i}") for i, options in enumerate(run.rewards)),
        eval_rewards=tuple(reward_plan(o, f"eval.rewards.{i}") for i, o in enumerate(run.eval.rewards)),
        anchor=anchor,
    )
    if run.optim.weight_decay is None:  # written into the run's configuration, as what it was trained with
        optim = replace(run.optim, weight_decay=resolved.training.weight_decay)
        resolved = replace(resolved, run=replace(run, optim=optim))
    return resolved


# ---- an unknown key: a message names the options of that name in the whole configuration


def placed(tree: Options, make: Callable[[], _Made]) -> _Made:
    """The result of `make`; its error about an unknown key names the places of options of that name. `tree` is the
    plain data of the configuration, for the names of its components; `make` validates it or one of them. Raises
    UnknownKey: with those places.
    """
    try:
        return make()
    except UnknownKey as error:
        meant = _meant(error, list(_places(tree)))
        raise (error.explained(meant=meant) if meant else error) from None


def _meant(error: UnknownKey, places: list[str]) -> tuple[str, ...]:
    """Options that may be meant, the likeliest first; () if only the key's own mapping has one."""
    last = {place: place.rpartition(".")[2] for place in places}
    local = registry.close_to(error.key, error.valid)
    elsewhere = [place for place, name in last.items() if name == error.key]
    if not elsewhere and local is None:
        alike = registry.close_to(error.key, list(last.values()), cutoff=0.8)
        elsewhere = [place for place, name in last.items() if name == alike]
    # Next to an option of exactly this name, one here must be like it, and not only share some letters.
    near = registry.close_to(error.key, error.valid, cutoff=0.55) if elsewhere else None
    return (*elsewhere[:4], *((near,) if near else ()))


def _places(tree: Options) -> Iterator[str]:
    """Dotted paths of all options of a configuration and of its built-in components."""
    yield from dotted(RunConfig)
    method, rollout = _name("algorithms", tree.get("algorithm"), "flow_grpo"), tree.get("rollout")
    sampler = rollout.get("sampler") if isinstance(rollout, dict) else None
    default = registry.stored("algorithms").get(method, {}).get("default_sampler", "flow_sde")
    for kind, name, prefix in (
        ("models", _name("models", tree.get("model")), "model."),
        ("algorithms", method, "algorithm."),
        ("samplers", _name("samplers", sampler, default), "rollout.sampler."),
    ):
        known = registry.stored(kind)
        yield from (prefix + each for each in known.get(name, known.get("", {})).get("options", ()))
    yield from dotted(RewardEntry, "rewards.0.")


def _name(kind: str, options: Any, default: str = "") -> str:
    """Name of a component; "" for a user's own file, whose code is not run for a message."""
    given = options if isinstance(options, dict) else {}
    return "" if kind in registry.BASES and given.get("path") else str(given.get("name") or default)
