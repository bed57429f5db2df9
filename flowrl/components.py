"""Components by name with their validated options: models, samplers, algorithms, and the entries of `rewards`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flowrl import registry
from flowrl.errors import ConfigError
from flowrl.strict import Options, UnknownKey, config_class, validate

if TYPE_CHECKING:
    from flowrl.models._classes import Choice

log = logging.getLogger("flowrl")


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
    return Component(name, module, validate(config_class(module, where, name), rest, where))


def model_component(options: Options, *, offline: bool = False) -> Component:
    """The adapter that `model.name` names; where it is left out, that of the pipeline's class.

    Args:
        options: of the model.
        offline: ask the hub for nothing; what is in its cache here is read.

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
    choice = choose(path, revision if isinstance(revision, str) else None, offline=offline)
    try:
        return component("models", {**options, "name": choice.name}, "model")
    except UnknownKey as error:
        raise error.told(note=_guessed(choice)) from None
    except ConfigError as error:
        raise ConfigError(f"{error}{_guessed(choice)}") from None


def _guessed(choice: Choice) -> str:
    return f" (model.name is left out and taken to be {choice.name}: {choice.reason})"
