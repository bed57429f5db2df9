"""Strict reading of plain data: YAML, `a.b=c` overrides, and dataclasses that refuse unknown keys.

No value is ever changed silently; every message names the key, the value and the nearest valid name.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from flowrl.core import assets, registry
from flowrl.core.errors import ConfigError
from flowrl.core.files import is_list, is_mapping
from flowrl.core.refused import FLOAT, explained, field_types

Options = dict[str, Any]

_TAG = "tag:yaml.org,2002:"
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]
"""First character of a plain value -> (tag, pattern) in the order of trial."""


def _resolvers(known: _Resolvers) -> _Resolvers:
    """PyYAML's resolvers without dates, and with the floats of YAML 1.2."""
    result = {first: [pair for pair in pairs if pair[0] != _TAG + "timestamp"] for first, pairs in known.items()}
    for first in "-+0123456789.":
        result.setdefault(first, []).append((_TAG + "float", FLOAT))
    return result


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats and no dates: YAML 1.1 reads 1e-4 as a string, and a name like 2025-01-31 as a date."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader.yaml_implicit_resolvers)


def parse_yaml(text: str, source: str) -> Any:
    """The plain data of a YAML text; `source` is for messages.

    Raises ConfigError: not YAML, or a key twice in a mapping, of which one value would be lost in silence.
    """
    try:
        loader = _Loader(text)  # refuses NUL and other control characters too
        loader.name = source
        node = loader.get_single_node()
        if node is not None:
            _refuse_doubled(node, source, (), {})
        return yaml.load(text, _Loader)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        mend = "\nYAML is indented by spaces alone: replace the tab by spaces" if r"'\t'" in str(error) else ""
        raise ConfigError(f"{source}: not valid YAML: {error}{mend}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from None
    # Errors of PyYAML's constructors: a value that does not fit its tag.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source}: not valid YAML: a value does not fit its tag ({error})") from None


def _refuse_doubled(node: yaml.Node, source: str, place: tuple[str, ...], seen: dict[int, bool]) -> None:
    """Refuse a mapping with a key twice, and a node that contains itself. Keys merged by `<<` may be overridden.
    `place`: keys that lead to the node; `seen`: id of each checked node -> whether this one is inside it.
    """
    if seen.get(id(node)):
        raise ConfigError(f"{source}, line {node.start_mark.line + 1}: {'.'.join(place)} contains itself (*alias)")
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
            if isinstance(key, yaml.ScalarNode):  # others cannot be keys in Python
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
    """Set `a.b.0.c=value` in a tree; the value is YAML. Lists are indexed, and missing mappings are made."""
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise ConfigError(f"override {word!r} is not of the form key=value, such as optim.learning_rate=1e-4")
    value, keys = parse_yaml(text, f"override {word!r}"), path.split(".")
    node: Any = tree
    for position, key in enumerate(keys):
        step: Any = key
        if is_list(node):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(
                    f"override {word!r}: {'.'.join(keys[:position])} is a list of {len(node)}, no item {key!r}"
                )
            step = int(key)
        elif not is_mapping(node):
            raise ConfigError(f"override {word!r}: {'.'.join(keys[:position])} is a plain value, it has no {key!r}")
        elif node.get(key) is None:
            node[key] = {}
        if position == len(keys) - 1:
            node[step] = value
        node = node[step]


def overridden(tree: Options, words: Iterable[str]) -> Options:
    """`tree` with every override set in it."""
    for word in words:
        apply_override(tree, word)
    return tree


class UnknownKey(ConfigError):
    """A mapping has a key that is not an option."""

    def __init__(self, place: str, value: Any, valid: Sequence[str], meant: Sequence[str] = (), note: str = "") -> None:
        """A key (dotted `place`) that is none of `valid`. `meant`: dotted paths of options with such a key; empty: the
        most similar valid one is named. `note` ends the message.
        """
        self.place, self.value, self.valid, self.note = place, value, list(valid), note
        self.key = place.rpartition(".")[2]
        named = " or ".join(repr(place) for place in meant)
        close = f"did you mean {named}? " if meant else registry.suggest(self.key, self.valid)
        known = f"valid keys: {', '.join(sorted(self.valid))}" if self.valid else "this component takes no options"
        super().__init__(f"{place}: unknown key (value {value!r}); {close}{known}{note}")

    def explained(self, *, meant: Sequence[str] = (), note: str = "") -> "UnknownKey":
        """The same error with more text."""
        return UnknownKey(self.place, self.value, self.valid, meant, self.note + note)


def require_positive(options: Mapping[str, Any], *names: str) -> None:
    """Refuse those of the options (as of `vars(config)`) that are named and not above 0, NaN included; null is allowed.
    Raises ValueError: with the option's name.
    """
    for name in names:
        if options[name] is not None and not options[name] > 0:
            raise ValueError(f"{name}={options[name]} must be positive")


def require_not_negative(options: Mapping[str, Any], *names: str) -> None:
    """As `require_positive`, with 0 allowed."""
    for name in names:
        if options[name] is not None and not options[name] >= 0:
            raise ValueError(f"{name}={options[name]} must not be negative")


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def validate(cls: type, value: Any, where: str) -> Any:
    """An instance of the dataclass `cls` from plain data. Raises ConfigError: with key, value and reason."""
    if not is_mapping(value):
        raise ConfigError(f"{where or 'the configuration'} must be a mapping of keys to values, got {value!r}")
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    _refuse_unknown(cls, value, where)
    # A Config that is not flowrl's checks infinities itself.
    _refuse_no_number(value, where, cls, infinite=cls.__module__.partition(".")[0] != "flowrl")
    try:
        # Through JSON, which is strict and still takes a list for a tuple.
        return _ADAPTERS[cls].validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise explained(cls, error, where) from None
    except TypeError as error:
        raise ConfigError(f"{where or 'the configuration'}: {error}") from None


def config_class(module: ModuleType, where: str, name: str) -> type:
    """`Config` of a component's module. Raises ConfigError: it lacks Config or build, or Config is not a dataclass."""
    config = vars(module).get("Config")
    if config is None or "build" not in vars(module):
        raise ConfigError(f"{where}: {name} is not a component: it must define Config and build(config)")
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"{where}: Config of {name} must be a dataclass, whose fields are its options")
    return config


def _refuse_unknown(cls: type, value: Options, where: str) -> None:
    hints = field_types(cls)
    for key, inner in value.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise UnknownKey(place, inner, list(hints))
        nested = hints[key]
        if nested is not None and is_mapping(inner):
            _refuse_unknown(nested, inner, place)


_LIMITS = {
    *("clip", "clip_range", "threshold", "veto_above", "advantage_max", "max_coef", "most_mean", "limit"),
    *("max_grad_norm", "at_least", "at_most"),
    *("spread", "turning"),  # refused by their own checks, with what to set instead
}
"""Options for which infinity means no limit."""


_WHOLE = 2**63
"""Whole numbers that torch and numpy take end below it."""


def _refuse_no_number(value: Any, where: str, cls: type | None, *, infinite: bool) -> None:
    """Refuse NaN, which passes every check of a range, infinity except as a limit, and what no 64 bits hold. `cls`:
    dataclass of the value; None: it has none, as a component's options. `infinite`: whether infinity is allowed.
    """
    fields = {} if cls is None else field_types(cls)
    for key, inner in value.items() if is_mapping(value) else enumerate(value) if is_list(value) else ():
        place = f"{where}.{key}" if where else str(key)
        takes, nested = infinite or key in _LIMITS, fields.get(str(key))
        if isinstance(inner, float) and (math.isnan(inner) or (math.isinf(inner) and not takes)):
            raise ConfigError(f"{place} = {inner}: must be a {'' if math.isnan(inner) else 'finite '}number")
        if isinstance(inner, int) and abs(inner) >= _WHOLE:
            raise ConfigError(f"{place} = {inner}: a whole number must be below 2^63 = {_WHOLE}")
        _refuse_no_number(inner, place, nested, infinite=takes or (nested is None and is_mapping(inner)))


def dotted(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all options of a dataclass and those inside it, such as `optim.ema.decay`."""
    for name, nested in field_types(cls).items():
        yield f"{prefix}{name}"
        if nested is not None:
            yield from dotted(nested, f"{prefix}{name}.")


def find_config(path: str | Path) -> Path:
    """The YAML of an argument CONFIG: a file, a run folder's or a recipe's. Raises ConfigError: there is none."""
    file = Path(path)
    if file.is_dir() and (file / "config.yaml").is_file():
        return file / "config.yaml"
    if file.is_file():
        return file
    shipped = assets.recipe_file(str(path))
    if shipped is None:
        beside = sorted(str(file.with_name(each.name)) for each in file.parent.glob("*.y*ml") if each.is_file())
        close = registry.suggest(str(path), beside) or registry.suggest(str(path), assets.recipes())
        there = "is a folder without config.yaml, so no run" if file.is_dir() else "does not exist"
        raise ConfigError(
            f"configuration file {str(path)!r} {there}, nor does a recipe of this name come with flowrl; {close}"
            "`flowrl list recipes` names them"
        )
    return shipped


def read_text(file: Path, where: str) -> str:
    """The text of a file, without a byte-order mark. Raises ConfigError: it cannot be read, or is not UTF-8."""
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
    """The plain data of a YAML file; for a run folder with the present `name` and `output`, as it may have moved."""
    file = find_config(path)
    tree = parse_yaml(read_text(file, str(file)), str(file))
    if not is_mapping(tree):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values")
    if Path(path).is_dir():
        folder = Path(path).resolve()
        tree |= {"name": folder.name, "output": str(folder.parent)}
    return tree
