"""Reading plain data strictly: YAML, `a.b=c` overrides, and dataclasses that refuse unknown keys.

No value is ever changed silently; every message names the key, the value and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from flowrl.core import assets, registry
from flowrl.core.errors import ConfigError

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
    """The plain data of a YAML text; `source` is for messages.

    Raises:
        ConfigError: no YAML, or a key that stands twice in a mapping: of two values one would be lost in silence.
    """
    try:
        loader = _Loader(text)  # a SafeLoader; refuses NUL and other control characters at once
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_doubled(node, source, (), {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from None
    # What PyYAML's own constructors let through: a number or a tag that its value does not fit.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source}: not valid YAML: a value does not fit its tag ({error})") from None


def _refuse_doubled(node: yaml.Node, source: str, place: tuple[str, ...], seen: dict[int, bool]) -> None:
    """Refuse a mapping with a key twice, and a node that holds itself. What `<<` merges may be overridden.

    Args:
        node: to look at.
        source: for messages.
        place: of the node, the keys that lead to it.
        seen: id of a node that was looked at -> whether this one lies in it.
    """
    if seen.get(id(node)):
        raise ConfigError(f"{source}, line {node.start_mark.line + 1}: {'.'.join(place)} holds itself (*alias)")
    if id(node) in seen:
        return
    seen[id(node)] = True
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _refuse_doubled(item, source, (*place, str(number)), seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            inner, line = place, key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):  # no other can be a key of a mapping of Python
                inner, known = (*place, key.value), first.get((key.tag, key.value))
                if known is not None:
                    raise ConfigError(
                        f"{source}, line {line}: the key {'.'.join(inner)!r} is there twice, first in line {known}; "
                        "keep one of them"
                    )
                first[key.tag, key.value] = line
            _refuse_doubled(value, source, inner, seen)
    seen[id(node)] = False


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


def overridden(tree: Options, words: Iterable[str]) -> Options:
    """`tree` with every override set in it."""
    for word in words:
        apply_override(tree, word)
    return tree


class UnknownKey(ConfigError):
    """A mapping has a key that nobody asks for."""

    def __init__(self, place: str, value: Any, valid: Sequence[str], meant: Sequence[str] = (), note: str = "") -> None:
        """
        Args:
            place: dotted, of the key.
            value: what it was given.
            valid: keys of that mapping.
            meant: dotted places where such a key is, if any; none looks for one among the valid.
            note: to say behind the message.
        """
        self.place, self.value, self.valid, self.note = place, value, list(valid), note
        self.key = place.rpartition(".")[2]
        named = " or ".join(repr(place) for place in meant)
        close = f"did you mean {named}? " if meant else registry.suggest(self.key, self.valid)
        known = f"valid keys: {', '.join(sorted(self.valid))}" if self.valid else "this component takes no options"
        super().__init__(f"{place}: unknown key (value {value!r}); {close}{known}{note}")

    def explained(self, *, meant: Sequence[str] = (), note: str = "") -> UnknownKey:
        """The same with more to say."""
        return UnknownKey(self.place, self.value, self.valid, meant, self.note + note)


def require_positive(**values: float | None) -> None:
    """Refuse an option that is not above 0, NaN too; null is let through.

    Raises:
        ValueError: naming the option.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be positive")


_ADAPTERS: dict[type, TypeAdapter] = {}


def validate(cls: type, value: Any, where: str) -> Any:
    """An instance of the dataclass `cls` from plain data, or ConfigError naming the key."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping of keys to values, got {value!r}")
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    _refuse_unknown(cls, value, where)
    # What another's Config takes, it judges itself.
    _refuse_no_number(value, where, cls, infinite=cls.__module__.partition(".")[0] != "flowrl")
    try:
        # Through JSON: strict, and still taking a list where a tuple is asked for.
        return _ADAPTERS[cls].validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(cls, error, where)) from None
    except TypeError as error:
        raise ConfigError(f"{where or 'the configuration'}: {error}") from None


def config_class(module: ModuleType, where: str, name: str) -> type:
    if not (hasattr(module, "Config") and hasattr(module, "build")):
        raise ConfigError(f"{where}: {name} is no component: it must define Config and build(config)")
    if not dataclasses.is_dataclass(module.Config):
        raise ConfigError(f"{where}: Config of {name} must be a dataclass, whose fields are its options")
    return module.Config


def _refuse_unknown(cls: type, value: Options, where: str) -> None:
    hints = _field_types(cls)
    for key, inner in value.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise UnknownKey(place, inner, list(hints))
        nested = hints[key]
        if nested is not None and isinstance(inner, dict):
            _refuse_unknown(nested, inner, place)


_LIMITS = frozenset(
    (
        *("clip", "clip_range", "threshold", "veto_above", "advantage_max", "max_coef", "most_mean", "limit"),
        *("max_grad_norm", "at_least", "at_most"),
        *("spread", "turning"),  # refused by their own checks, with what to set instead
    )
)
"""Options where infinity has a meaning: no limit."""


def _refuse_no_number(value: Any, where: str, cls: type | None, *, infinite: bool) -> None:
    """No option means anything as NaN, and every check of a range lets it pass; few do as infinity.

    Args:
        value: to look at.
        where: its place.
        cls: the dataclass that it is of, if it is one. Any other mapping is judged by whose it is.
        infinite: whether infinity is taken.
    """
    fields = {} if cls is None else _field_types(cls)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        place = f"{where}.{key}" if where else str(key)
        takes, nested = infinite or key in _LIMITS, fields.get(str(key))
        if isinstance(inner, float) and (math.isnan(inner) or (math.isinf(inner) and not takes)):
            raise ConfigError(f"{place} = {inner}: must be a {'' if math.isnan(inner) else 'finite '}number")
        _refuse_no_number(inner, place, nested, infinite=takes or (nested is None and isinstance(inner, dict)))


def _field_types(cls: type) -> dict[str, type | None]:
    """Field name -> the dataclass inside it, or None."""
    result: dict[str, type | None] = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        options = [hints[item.name], *typing.get_args(hints[item.name])]
        result[item.name] = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    return result


def dotted(cls: type, prefix: str = "") -> Iterator[str]:
    """Every option of a dataclass and of those inside it, as the words of an override: `optim.ema.decay`."""
    for name, nested in _field_types(cls).items():
        yield f"{prefix}{name}"
        if nested is not None:
            yield from dotted(nested, f"{prefix}{name}.")


def _names(cls: type, place: Sequence[str | int]) -> tuple[Any, ...]:
    """Values that the field at `place` may have, where they are names; () where they are not, or there is none."""
    inner: type | None = cls
    for part in place[:-1]:
        inner = None if inner is None else _field_types(inner).get(str(part))
    hint = None if inner is None else typing.get_type_hints(inner).get(str(place[-1]))
    kinds = (hint, *typing.get_args(hint))
    return next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), ())


def _explain(cls: type, error: ValidationError, where: str) -> str:
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in ((where,) if where else ()) + problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        shown = "" if problem["type"] in ("missing", "value_error") else f" = {problem['input']!r}"
        names = [str(name) for name in _names(cls, problem["loc"])] if problem["loc"] else []
        known = f"; there are: {', '.join(names)}" if names else ""
        if problem["type"] == "missing":
            message = f"is required{known}"
        elif problem["type"] == "literal_error":
            message += f"; {registry.suggest(str(problem['input']), names)}".removesuffix("; ").rstrip()
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
    shipped = assets.recipe_file(str(path))
    if shipped is None:
        close = registry.suggest(str(path), assets.recipes())
        raise ConfigError(
            f"configuration file {str(path)!r} does not exist, nor does a recipe of this name come with flowrl; {close}"
            "`flowrl list recipes` names them"
        )
    return shipped


def read_text(file: Path, where: str) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{where}: not UTF-8 text ({error.reason} at byte {error.start}, line {line}); save it as UTF-8"
        ) from None


def load_tree(path: str | Path) -> Options:
    """The plain data of a YAML file; of a run folder, which may have been moved, `name` and `output` are what they are
    now."""
    file = find_config(path)
    tree = parse_yaml(read_text(file, str(file)), str(file))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    if Path(path).is_dir():
        folder = Path(path).resolve()
        tree |= {"name": folder.name, "output": str(folder.parent)}
    return tree
