"""Options of a dataclass with type, default and the text under each field, for pages and lists."""

import ast
import collections.abc
import dataclasses
import functools
import inspect
import json
import operator
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option in words."""

    name: str
    """Dotted key inside the component."""
    type: str
    """What it takes, as YAML has it."""
    default: str
    """Default as YAML has it, or `required`."""
    about: str
    """The text under the field in one line, or ""."""
    depth: int = 0
    """Number of mappings around it."""


def option_texts(cls: type, default: Any = None, prefix: str = "") -> Iterator[OptionText]:
    """The options of a dataclass in the order of its fields; those of a nested dataclass follow its own line.
    `default`: instance whose values are the defaults; None: those of the class. `prefix`: dotted path before the names.
    """
    texts, hints = field_texts(cls), typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        made = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        value = made if default is None else operator.attrgetter(item.name)(default)
        hint, inner = hints.get(item.name, item.type), _nested(hints.get(item.name))
        shown = REQUIRED if value is dataclasses.MISSING else _yaml(value, nested=inner is not None)
        depth = prefix.count(".")
        yield OptionText(f"{prefix}{item.name}", in_words(hint), shown, texts.get(item.name, ""), depth)
        if inner is not None:
            made = value if dataclasses.is_dataclass(value) and not isinstance(value, type) else None
            yield from option_texts(inner if made is None else type(made), made, f"{prefix}{item.name}.")


def _yaml(value: Any, *, nested: bool) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if nested and dataclasses.is_dataclass(value):
        return "as below"
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float | int):
        return f"{value:g}" if isinstance(value, float) else str(value)
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _nested(hint: Any) -> type | None:
    """The dataclass of a type or of its union; None if there is none."""
    choices = (hint, *typing.get_args(hint))
    return next((one for one in choices if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "anything"}


def in_words(hint: Any) -> str:
    """A type in words.

    >>> from typing import Literal
    >>> in_words(float | None), in_words(Literal["a", 1]), in_words(list[int]), in_words(tuple[float, float])
    ('number or null', 'a or 1', 'list of integer', '[number, number]')
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is typing.Literal:
        return " or ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(one) for one in inner)
    if origin is tuple:
        return f"list of {in_words(inner[0])}" if ... in inner else f"[{', '.join(map(in_words, inner))}]"
    if origin in (list, set, frozenset) or origin is collections.abc.Sequence:
        return f"list of {in_words(inner[0])}"
    if dict in (hint, origin) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return "mapping"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def field_texts(cls: type) -> dict[str, str]:
    """Field name -> the text under it in one line, those of base classes included; a field without text has none."""
    result: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            result |= _texts_of(each)
    return result


@functools.cache
def _texts_of(cls: type) -> dict[str, str]:
    module = sys.modules.get(cls.__module__)
    file = None if module is None else module.__file__
    body = None if file is None else _classes(file).get(cls.__name__)
    result: dict[str, str] = {}
    for statement, after in zip(body or (), [*(body or ())[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            result[statement.target.id] = " ".join(inspect.cleandoc(after.value.value).split())
    return result


@functools.cache
def _classes(file: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(Path(file).read_bytes())
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
