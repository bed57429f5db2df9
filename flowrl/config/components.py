"""Components by name with validated options: models, samplers and algorithms."""

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.core import registry
from flowrl.core.errors import ConfigError, Fault, described
from flowrl.core.strict import Options, UnknownKey, config_class, validate
from flowrl.models.pipelines.classes import GENERIC, Choice, choose
from flowrl.scoring.entries import imported

log = logging.getLogger("flowrl")


@dataclass(frozen=True, slots=True)
class Component:
    """A resolved component: its module and validated options."""

    name: str
    module: ModuleType
    config: Any
    path: str | None = None
    """The user's file, if the configuration names one."""

    @property
    def reference(self) -> Options:
        """The option that names it: {"name": ...} or {"path": ...}."""
        return {"name": self.name} if self.path is None else {"path": self.path}

    def build(self) -> Any:
        """The component. Raises ConfigError: a user's file that fails."""
        if self.path is None:
            return self.module.build(self.config)
        try:
            return self.module.build(self.config)
        except Fault:
            raise
        except Exception as error:  # a user's code may raise anything
            log.debug("%s cannot be built", self.path, exc_info=error)
            raise ConfigError(f"{self.path} cannot be built: {described(error)}") from error


def component(kind: str, options: Options, where: str, default: str | None = None) -> Component:
    """The component that `options` name, else `default`; its Config validates the other keys.

    `path` is the file of a sampler or a method, and an option of a model.

    Raises ConfigError: an unknown name, a file that cannot be used, or a bad option.
    """
    rest, own = dict(options), kind in registry.BASES
    name, path = rest.pop("name", None), rest.pop("path", None) if own else None
    if name is not None and path is not None:
        raise ConfigError(
            f"{where}: name={name!r} and path={path!r}: one of them is given",
            [{f"{where}.path": None}, {f"{where}.name": None}],
        )
    if path is not None and not str(path).endswith(".py"):
        raise ConfigError(f"{where}.path={path!r} must be a .py file; use name for a module")
    result = path or name or default
    if not isinstance(result, str):
        raise ConfigError(f"{where}.name is required; there are: {', '.join(registry.names(kind))}")
    module = imported(kind, result, where)
    config = validate(config_class(module, where, result), rest, where)
    if not own or module.__name__.startswith("flowrl."):
        return Component(result, module, config)
    made = Component(result if path is None else Path(result).stem, module, config, path)
    place, of = registry.BASES[kind]
    base = vars(importlib.import_module(place))[of]
    if kind == "algorithms" and not isinstance(config, base.Config):
        raise ConfigError(f"{where}: Config of {made.name} must extend flowrl.Method.Config, which has the checks")
    if not isinstance(built := made.build(), base):
        raise ConfigError(f"{where}: build(config) of {made.name} gives a {type(built).__name__}, not a flowrl.{of}")
    return made


def model_component(options: Options, *, offline: bool = False) -> Component:
    """The adapter that `model.name` names, else that of the pipeline's class. `offline` reads the hub's cache on this
    machine alone.

    Raises ConfigError: a bad option, or one of another adapter; ModelError: there is no such model, or its class is not
    known.
    """
    if options.get("name") is not None:
        return component("models", options, "model")
    if options.get("pipeline") is not None:
        return component("models", {**options, "name": GENERIC}, "model")  # no other adapter takes a class by its name
    path, revision = options.get("path"), options.get("revision")
    if not isinstance(path, str):
        raise ConfigError("model.path is required: a hub id, a folder, or an embedded asset such as tiny-sd3")
    choice = choose(path, revision if isinstance(revision, str) else None, offline=offline)
    try:
        return component("models", {**options, "name": choice.name}, "model")
    except UnknownKey as error:
        raise error.explained(note=_guessed(choice)) from None
    except ConfigError as error:
        raise ConfigError.about(error, after=_guessed(choice)) from None


def _guessed(choice: Choice) -> str:
    return f" (model.name is left out and taken to be {choice.name}: {choice.reason})"
