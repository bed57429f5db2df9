"""Absolute paths in configurations: a path is relative to the file that holds it.

A path of the command line is relative to the working directory, and so is `output`. Names that are not files stay.
"""

import glob
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core import registry
from flowrl.core.assets import asset_roots, embedded_prompts
from flowrl.core.errors import ConfigError
from flowrl.core.paths import OUTPUT, PATH, ComponentOf, Place, expanded, lost, lost_in, relative_to_folder, split_of
from flowrl.core.refused import field_types
from flowrl.core.strict import Options
from flowrl.scoring.options import RewardEntry

_SUFFIXES = (".py", ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json", ".jsonl", ".yaml", ".yml", ".txt")
_STARTS = ("./", "../", "/", "~")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values of a configuration come from."""

    folder: Path
    """Folder of the file."""
    overridden: tuple[str, ...] = ()
    """Keys of the command line, such as `rewards.0.path`."""
    holders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Dotted key of a value of an extended file -> the folder of its paths."""

    def base(self, key: str) -> Path:
        """The folder that a path under this key is relative to."""
        if any(inside(key, place) for place in self.overridden):
            return Path.cwd()
        return next((folder for place, folder in self.holders.items() if inside(key, place)), self.folder)


def inside(key: str, place: str) -> bool:
    """Whether a dotted key is `place`, or below it."""
    return key == place or key.startswith(f"{place}.")


def located(cls: type, tree: Options, origin: Origin, where: str = "") -> Options:
    """A copy of the plain data of a dataclass with absolute paths in its marked options.

    Values of a wrong type stay, for the dataclass to refuse.

    Raises ConfigError: an environment variable that is not set, or a path that exists from the working directory alone.
    """
    hints, nested, result = typing.get_type_hints(cls, include_extras=True), field_types(cls), dict(tree)
    for key in tree.keys() & nested.keys():
        value, place = tree[key], f"{where}.{key}" if where else key
        marks = typing.get_args(hints[key])
        mark = next((one for one in marks if isinstance(one, Place | ComponentOf)), None)
        if isinstance(mark, Place) and isinstance(value, str):
            result[key] = _located(value, mark, place, origin.base(place))
        elif isinstance(mark, Place) and isinstance(value, dict):
            result[key] = {
                name: _located(each, mark, f"{place}.{name}", origin.base(f"{place}.{name}"))
                if isinstance(each, str)
                else each
                for name, each in value.items()
            }
        elif isinstance(mark, ComponentOf) and isinstance(value, list):
            result[key] = [_component(mark.kind, v, origin, f"{place}.{i}") for i, v in enumerate(value)]
        elif isinstance(mark, ComponentOf):
            result[key] = _component(mark.kind, value, origin, place)
        elif isinstance(value, dict) and (inner := nested[key]) is not None:
            result[key] = located(inner, value, origin, place)
    return result


def _component(kind: str, options: Any, origin: Origin, where: str) -> Any:
    """The options of a component with absolute paths."""
    if not isinstance(options, dict):
        return options
    result = dict(options)
    if kind == "rewards":
        result = located(RewardEntry, result, origin, where)
    name = result.get("name")
    if isinstance(name, str) and name.endswith(".py"):
        result["name"] = name = _located(name, PATH, f"{where}.name", origin.base(f"{where}.name"))
    if kind in registry.BASES and isinstance(result.get("path"), str):
        result["path"] = _located(result["path"], PATH, f"{where}.path", origin.base(f"{where}.path"))
    if isinstance(name, str) and name in registry.names(kind):
        return located(registry.load(kind, name).Config, result, origin, where)
    if kind == "models" and name is None:
        from flowrl.models.base import ModelConfig

        return located(ModelConfig, result, origin, where)
    # The options of a component that is not built in are not known before its code runs, so their values decide.
    shared = set(field_types(RewardEntry)) if kind == "rewards" else {"name"}
    shared |= {"path"} if kind in registry.BASES else set()
    own = {key: value for key, value in result.items() if key not in shared}
    return result | {key: _plainly(value, f"{where}.{key}", origin) for key, value in own.items()}


def _plainly(value: Any, key: str, origin: Origin) -> Any:
    """Plain data in which strings that begin like a path are made absolute."""
    if isinstance(value, str) and value.startswith(_STARTS):
        return _located(value, PATH, key, origin.base(key))
    if isinstance(value, dict):
        return {k: _plainly(v, f"{key}.{k}", origin) for k, v in value.items()}
    if isinstance(value, list):
        return [_plainly(v, f"{key}.{i}", origin) for i, v in enumerate(value)]
    return value


def _located(value: str, mark: Place, key: str, base: Path) -> str:
    """One value of a marked option."""
    text = expanded(value, key)
    kind = mark.kind
    if not text or mark == OUTPUT or (kind == "cache" and text == "memory"):
        return text
    if kind in ("prompts", "pairs") and text.startswith("hf:"):
        path, split = split_of(text.removeprefix("hf:"))
        path = _located(path, Place("name"), key, base)
        return f"hf:{path}:{split}" if split else f"hf:{path}"
    if "://" in text or (kind == "prompts" and text.startswith("shapes:")):
        return text
    path = relative_to_folder(base, text)
    if os.path.exists(path):
        return path
    if kind == "prompts" and embedded_prompts(text) is not None:
        return text
    if kind == "name" and not _looks_like_path(text) and any((root / text).is_dir() for root in asset_roots()):
        return text
    if kind != "cache":
        _refuse_elsewhere(value, text, path, key, base)
    if kind == "name" and (folder := lost_in(text, base)) is not None:
        raise ConfigError(f"{key}={value!r}: {lost(folder)}")
    return text if kind == "name" and not _looks_like_path(text) else path


def _looks_like_path(text: str) -> bool:
    return text.startswith(_STARTS) or text in (".", "..") or text.lower().endswith(_SUFFIXES)


def _refuse_elsewhere(value: str, text: str, path: str, key: str, base: Path) -> None:
    """Refuse a path that exists only from the working directory: either may be meant. Raises ConfigError: with both."""
    if base.absolute() == Path.cwd() or glob.glob(path) or not (os.path.exists(text) or glob.glob(text)):
        return
    there = os.path.relpath(text, base)
    raise ConfigError(
        f"{key}={value!r}: there is no {path}. Paths in a configuration are relative to its folder, "
        f"{base.absolute()}, and only the working directory has {text!r}: write {there!r} in the file",
        {key: text},
    )
