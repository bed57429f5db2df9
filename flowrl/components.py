"""Components by name with their validated options: models, samplers, algorithms, and the entries of `rewards`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl import registry
from flowrl.reward import Card, Reward, WeightedReward
from flowrl.strict import ConfigError, Options, validate


@dataclass(frozen=True, slots=True)
class Component:
    """A resolved component: its module and validated options."""

    name: str
    module: ModuleType
    config: Any

    def build(self) -> Any:
        return self.module.build(self.config)


def component(kind: str, options: Options, where: str, default: str | None = None) -> Component:
    """The component that `options` names (else `default`), with its other keys validated by its own Config."""
    rest = dict(options)
    name = rest.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{where}.name is required; there are: {', '.join(registry.names(kind))}")
    try:
        module = registry.load(kind, name)
    except registry.UnknownName as error:
        raise ConfigError(f"{where}: {error}") from None
    return Component(name, module, validate(_config_class(module, where, name), rest, where))


def model_component(options: Options) -> Component:
    """The adapter that `model.name` names; where it is left out, that of the pipeline's class.

    Raises:
        ConfigError: a bad option, or one of an adapter that was not chosen.
        ModelError: there is no such model, or its class cannot be known.
    """
    if options.get("name") is not None:
        return component("models", options, "model")
    from flowrl.models._classes import choose

    path, revision = options.get("path"), options.get("revision")
    if not isinstance(path, str):
        raise ConfigError("model.path is required: a hub id, a folder, or an embedded asset such as tiny-sd3")
    choice = choose(path, revision if isinstance(revision, str) else None)
    try:
        return component("models", {**options, "name": choice.name}, "model")
    except ConfigError as error:
        raise ConfigError(f"{error} (model.name is left out and taken to be {choice.name}: {choice.reason})") from None


def _config_class(module: ModuleType, where: str, name: str) -> type:
    if not (hasattr(module, "Config") and hasattr(module, "build")):
        raise ConfigError(f"{where}: {name} is no component: it must define Config and build(config)")
    return module.Config


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardEntry:
    """Options every reward entry has; the others are the reward's own."""

    name: str | None = None
    """A built-in reward or a dotted module path."""
    path: str | None = None
    """Your own file with `score(images, prompts, metadata)`."""
    weight: float = 1.0
    """Share in the training value; 0 only looks at it."""
    outputs: dict[str, float] = field(default_factory=dict)
    """Of a reward with several values: value -> share; empty: its first."""
    scale: float = 1.0
    """The training value is clip(scale * raw + offset); raw is what is logged."""
    offset: float = 0.0
    clip: list[float] | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either name or path")
        if self.clip is not None and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            raise ValueError(f"clip={self.clip} must be [low, high]")


@dataclass(frozen=True, slots=True)
class RewardPlan:
    """A reward entry with its module; `build` loads its weights, if it has any."""

    entry: RewardEntry
    module: ModuleType
    config: Any

    @property
    def name(self) -> str:
        return self.entry.name or Path(str(self.entry.path)).stem

    def same_component(self, other: RewardPlan) -> bool:
        """Whether both entries name one component with the same options of its own: it is then built and run once."""
        # By name and plain values: a user's file is a new module, with a new Config class, each time it is loaded.
        if self.module.__name__ != other.module.__name__:
            return False
        mine, theirs = (p.config and dataclasses.asdict(p.config) for p in (self, other))
        return mine == theirs

    def build(self, shared: Reward | None = None) -> WeightedReward:
        """The entry with its component, or with `shared` where another entry has built that already."""
        if shared is not None:
            reward = shared
        elif hasattr(self.module, "build"):
            reward = self.module.build(self.config)
        else:
            reward = Reward(score=self.module.score, card=Card(outputs=(self.name,), source=str(self.entry.path)))
        entry = self.entry
        clip = (entry.clip[0], entry.clip[1]) if entry.clip is not None else None
        return WeightedReward(self.name, reward, entry.weight, dict(entry.outputs), entry.scale, entry.offset, clip)


def reward_plan(options: Options, where: str) -> RewardPlan:
    """Resolve and validate one entry of `rewards`.

    Raises:
        ConfigError: no such reward, a file without `score`, a bad option.
    """
    common = {f.name for f in dataclasses.fields(RewardEntry)}
    entry = validate(RewardEntry, {k: v for k, v in options.items() if k in common}, where)
    own = {k: v for k, v in options.items() if k not in common}
    name = entry.path if entry.path is not None else entry.name
    try:
        if entry.path is not None and not entry.path.endswith(".py"):
            raise registry.UnknownName(f"path={entry.path!r} must be a .py file; use name for a module")
        module = registry.load("rewards", name)
    except registry.UnknownName as error:
        raise ConfigError(f"{where}: {error}") from None
    except (Exception, SystemExit) as error:  # a user's file may raise anything when it is run
        raise ConfigError(f"{where}: {name} cannot be imported: {type(error).__name__}: {error}") from error
    if hasattr(module, "build"):
        return RewardPlan(entry, module, validate(_config_class(module, where, str(name)), own, where))
    if not callable(getattr(module, "score", None)):
        raise ConfigError(f"{where}: {name} defines neither score(images, prompts, metadata) nor build(config)")
    if own:
        close = registry.suggest(next(iter(own)), sorted(common))
        raise ConfigError(
            f"{where}.{next(iter(own))}: unknown key; {close}a one-file reward without Config takes: "
            f"{', '.join(sorted(common))}"
        )
    return RewardPlan(entry, module, None)
