"""Reading plain data strictly: YAML, `a.b=c` overrides, and dataclasses that refuse unknown keys.

No value is ever changed silently; every message names the key, the value and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from flowrl import embedded, registry
from flowrl.errors import ConfigError as ConfigError  # most modules know it by this one

Options = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats and no dates: plain YAML 1.1 reads 1e-4 as a string, and a name like 2025-01-31 as a date."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\.\d[\d_]*|\d[\d_]*(\.[\d_]*)?)[eE][-+]?\d+$|^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN)$"
    ),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def apply_override(tree: Options, word: str) -> None:
    """Set `a.b.0.c=value` in a tree; the value is YAML. Lists are indexed, missing mappings are made."""
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise ConfigError(f"override {word!r} is not of the form key=value, such as optim.learning_rate=1e-4")
    value, keys = parse_yaml(text, f"override {word!r}"), path.split(".")
    node: Any = tree
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(
                    f"override {word!r}: {'.'.join(keys[:position])} is a list of {len(node)}, no item {key!r}"
                )
            key = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f"override {word!r}: {'.'.join(keys[:position])} is a plain value, it has no {key!r}")
        if last:
            node[key] = value
        else:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]


_ADAPTERS: dict[type, TypeAdapter] = {}


def validate(cls: type, value: Any, where: str) -> Any:
    """An instance of the dataclass `cls` from plain data, or ConfigError naming the key."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping of keys to values, got {value!r}")
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    _refuse_unknown(cls, value, where)
    _refuse_nan(value, where)
    try:
        # Through JSON: strict, and still taking a list where a tuple is asked for.
        return _ADAPTERS[cls].validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None
    except TypeError as error:
        raise ConfigError(f"{where or 'the configuration'}: {error}") from None


def _refuse_unknown(cls: type, value: Options, where: str) -> None:
    hints = _field_types(cls)
    for key, inner in value.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in hints:
            close = registry.suggest(str(key), list(hints))
            raise ConfigError(f"{place}: unknown key (value {inner!r}); {close}{_valid(hints)}")
        nested = hints[key]
        if nested is not None and isinstance(inner, dict):
            _refuse_unknown(nested, inner, place)


def _refuse_nan(value: Any, where: str) -> None:
    """No option means anything as NaN, and every check of a range lets it pass."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        place = f"{where}.{key}" if where else str(key)
        if isinstance(inner, float) and inner != inner:
            raise ConfigError(f"{place} = nan: must be a number")
        _refuse_nan(inner, place)


def _valid(hints: Options) -> str:
    return f"valid keys: {', '.join(sorted(hints))}" if hints else "this component takes no options"


def _field_types(cls: type) -> dict[str, type | None]:
    """Field name -> the dataclass inside it, or None."""
    found: dict[str, type | None] = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        options = [hints[item.name], *typing.get_args(hints[item.name])]
        found[item.name] = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    return found


def _explain(error: ValidationError, where: str) -> str:
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in ((where,) if where else ()) + problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        shown = "" if problem["type"] in ("missing", "value_error") else f" = {problem['input']!r}"
        if problem["type"] == "missing":
            message = "is required"
        lines.append(f"{place or 'configuration'}{shown}: {message}")
    return "\n".join(lines)


def find_config(path: str | Path) -> Path:
    """The YAML file that the argument CONFIG of a command means: a file, the one in a run folder, a shipped recipe.

    Raises:
        ConfigError: there is neither.
    """
    file = Path(path)
    if file.is_dir() and (file / "config.yaml").is_file():
        return file / "config.yaml"
    if file.is_file():
        return file
    shipped = embedded.recipe_file(str(path))
    if shipped is None:
        close = registry.suggest(str(path), embedded.recipes())
        raise ConfigError(
            f"configuration file {str(path)!r} does not exist, nor does a recipe of this name come with flowrl; {close}"
            "`flowrl list recipes` names them"
        )
    return shipped


def load_tree(path: str | Path, overrides: list[str] | None = None) -> Options:
    """The plain data of a YAML file with overrides applied; of a run folder, which may have been moved, `name` and
    `output` are what they are now."""
    file = find_config(path)
    tree = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    if Path(path).is_dir():
        folder = Path(path).resolve()
        tree |= {"name": folder.name, "output": str(folder.parent)}
    for word in overrides or []:
        apply_override(tree, word)
    return tree
