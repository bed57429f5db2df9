"""Values of a Python configuration that is read: its ConfigDicts, its functions, and the operations that are done."""

import ast
import copy
import inspect
import operator
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, many: value in many,
    ast.NotIn: lambda value, many: value not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.BitOr: operator.or_,
    ast.USub: lambda value, _: -value,
    ast.UAdd: lambda value, _: +value,
    ast.Not: lambda value, _: not value,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (int, float, str, bool, round, max, min, len, dict, tuple)},
    "copy.deepcopy": copy.deepcopy,
    "os.path.join": posixpath.join,
    "os.getcwd": lambda: "",  # paths stay relative to the folder that the tool was started in
}
DICTS = ("ml_collections.ConfigDict", "config_dict.ConfigDict", "ConfigDict", "ml_collections.config_dict.ConfigDict")


class Node(dict[str, Any]):
    """A ConfigDict."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: set[str] = set()
        """Names that were set in it since it was made, or copied by `untouched`."""


def untouched(node: Node) -> Node:
    """A copy in which no name counts as assigned."""
    result = Node()
    for name, value in node.items():
        result[name] = untouched(value) if isinstance(value, Node) else copy.deepcopy(value)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of the file."""

    node: ast.FunctionDef
    signature: inspect.Signature
    """Its parameters; a default that cannot be read is the ConfigError that says so."""
    around: dict[str, Any]
    """Names around it, as they are when it is called."""


def signature(given: ast.arguments, default: Callable[[ast.expr], Any]) -> inspect.Signature:
    """Parameters of a function; `default` gives the value of a default."""
    kind = inspect.Parameter
    places = [(each.arg, kind.POSITIONAL_ONLY) for each in given.posonlyargs]
    places += [(each.arg, kind.POSITIONAL_OR_KEYWORD) for each in given.args]
    values = [kind.empty] * (len(places) - len(given.defaults)) + [default(each) for each in given.defaults]
    parts = [kind(name, place, default=value) for (name, place), value in zip(places, values, strict=True)]
    if given.vararg is not None:
        parts.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        own = kind.empty if value is None else default(value)
        parts.append(kind(each.arg, kind.KEYWORD_ONLY, default=own))
    if given.kwarg is not None:
        parts.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parts)


def nests(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries are nested in more levels."""
    if not isinstance(value, list | tuple | dict) or isinstance(value, Node):
        return False
    parts = value.values() if isinstance(value, dict) else value
    # One look at each part, however often it occurs.
    return levels == 0 or any(nests(each, levels - 1) for each in {id(each): each for each in parts}.values())


def flat(tree: Node, prefix: str = "") -> dict[str, tuple[bool, Any]]:
    """Dotted key -> (whether it was assigned, its value); plain dicts are values."""
    result: dict[str, tuple[bool, Any]] = {}
    for name, value in tree.items():
        if isinstance(value, Node) and value:
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = (name in tree.assigned, {} if isinstance(value, Node) else value)
    return result
