"""What pydantic refuses, in words of a configuration: key, value, reason, and the remedies of a component."""

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from flowrl.core import registry
from flowrl.core.errors import ConfigError, Remedy, advised, remedies_of, told

FLOAT = re.compile(
    r"^[-+]?(\.\d[\d_]*|\d[\d_]*(\.[\d_]*)?)[eE][-+]?\d+$|^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)$"
    r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN)$"
)
"""Floats of YAML 1.2."""
_NUMBER = re.compile(rf"{FLOAT.pattern}|^[-+]?\d[\d_]*$")


def field_types(cls: type) -> dict[str, type | None]:
    """Field name -> the dataclass of its type, or None."""
    result: dict[str, type | None] = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        options = [hints[item.name], *typing.get_args(hints[item.name])]
        result[item.name] = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    return result


def _names(cls: type, place: Sequence[str | int]) -> tuple[Any, ...]:
    """Values of a field whose type is a Literal; () for another type or an unknown place."""
    inner: type | None = cls
    for part in place[:-1]:
        inner = None if inner is None else field_types(inner).get(str(part))
    hint = None if inner is None else typing.get_type_hints(inner).get(str(place[-1]))
    kinds = (hint, *typing.get_args(hint))
    return next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), ())


def explained(cls: type, error: ValidationError, where: str) -> ConfigError:
    """The errors of pydantic as lines: key, value, reason; the remedies of several stand in their lines."""
    lines: list[str] = []
    advice: list[tuple[Remedy, ...]] = []
    for place, choices in _either(error).items():
        shown = next(problem["input"] for problem in error.errors() if problem["loc"][:-1] == place)
        lines.append(f"{_dotted(where, place)} = {shown!r}: must be {' or '.join(choices)}")
        advice.append(())
    for problem in error.errors():
        if problem["loc"][:-1] in _either(error):
            continue
        place = _dotted(where, problem["loc"])
        raised = problem.get("ctx", {}).get("error")
        message = problem["msg"] if raised is None else told(raised)
        shown = "" if problem["type"] in ("missing", "value_error") else f" = {problem['input']!r}"
        names = [str(name) for name in _names(cls, problem["loc"])] if problem["loc"] else []
        known = f"; there are: {', '.join(names)}" if names else ""
        if problem["type"] == "missing":
            message = f"is required{known}"
        elif problem["type"] == "literal_error":
            message += f"; {registry.suggest(str(problem['input']), names)}".removesuffix("; ").rstrip()
        else:
            message = _must_be(problem["type"], problem["input"], place) or message
        lines.append(f"{place or 'configuration'}{shown}: {message}")
        advice.append(() if raised is None else remedies_of(raised, place))
    if len(lines) == 1:
        return ConfigError(lines[0], remedies=advice[0])
    return ConfigError("\n".join(f"{line}{advised(each)}" for line, each in zip(lines, advice, strict=True)))


def _dotted(where: str, place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in ((where,) if where else ()) + tuple(place))


def _must_be(problem: str, value: Any, place: str) -> str:
    """The reason and the remedy for a value of another type; "" for another problem."""
    kind = _KINDS.get(problem.removesuffix("_type"), "")
    if not kind:
        return ""
    if value is None:
        return f"null has no meaning here; it must be {kind}, or left out if it has a default"
    if problem == "string_type" and isinstance(value, int | float):
        return "must be text; put it in quotes"
    if problem in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.match(value):
        return f"must be {kind}; take the quotes away"
    if problem == "dict_type" and isinstance(value, str):  # the options of a component
        key = "path" if place == "model" or value.endswith(".py") else "name"
        return f"must be {kind}, such as {{{key}: {value}}}"
    return f"must be {kind}"


_SCALARS = {"bool": "true or false", "int": "a whole number", "float": "a number"}
_LIST, _MAPPING = "a list, such as [a, b]", "a mapping of keys to values"
_KINDS = _SCALARS | {"string": "text", "list": _LIST, "tuple": _LIST, "dict": _MAPPING, "dataclass": _MAPPING}
"""First part of pydantic's type of an error -> what the value must be, in words of YAML."""


def _either(error: ValidationError) -> dict[tuple[str | int, ...], list[str]]:
    """Place of an option that takes several kinds of plain values -> those kinds in words."""
    result: dict[tuple[str | int, ...], list[str]] = {}
    for problem in error.errors():
        # pydantic adds the kind that it tried to the place: `int`, `str`, `list[str]`, `literal['a']`, a class.
        kind = str(problem["loc"][-1]) if problem["loc"] else ""
        words = _SCALARS.get(kind) or {"str": "text", "list": "a list"}.get(kind.partition("[")[0])
        if kind.startswith("literal["):
            words = kind.removeprefix("literal[").removesuffix("]").replace("'", "").replace(",", ", ")
        elif problem["type"] == "dataclass_type" and kind[:1].isupper():
            words = _MAPPING
        if words:
            result.setdefault(problem["loc"][:-1], []).append(words)
    return {place: choices for place, choices in result.items() if len(choices) > 1}
