"""A Python configuration of flow_grpo, read as a syntax tree: assignments and arithmetic alone, nothing is executed."""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.strict import read_text

_LARGEST = 10**18
_LONGEST = 10_000
_DEEPEST = 20
_REMEDY = "the file is read and never executed; write the value itself"

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
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
    ast.USub: lambda value, _: -value,
    ast.UAdd: lambda value, _: +value,
    ast.Not: lambda value, _: not value,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "round": round,
    "max": max,
    "min": min,
    "len": len,
    "dict": dict,
    "tuple": tuple,
    "os.path.join": posixpath.join,
    "os.getcwd": lambda: "",  # paths stay relative to the folder that the tool was started in
}
_DICTS = ("ml_collections.ConfigDict", "config_dict.ConfigDict", "ConfigDict", "ml_collections.config_dict.ConfigDict")


class Node(dict[str, Any]):
    """A ConfigDict."""


class Reader:
    """The functions of one file.

    Args:
        file: a Python file.
        calls: dotted name -> what a call of it gives, such as `base.get_config`.
    """

    def __init__(self, file: Path, calls: dict[str, Callable[[], Any]] | None = None) -> None:
        self.file, self._calls = file, calls or {}
        self.assigned: set[tuple[int, str]] = set()
        """(id of a node, name) of the values that this file sets."""
        self.names: dict[str, Any] = {}
        """Names inside the function that was read last."""
        self._stack: list[str] = []
        try:
            module = ast.parse(read_text(file, str(file)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{file}: it is not valid Python: {error}") from None
        self.functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
        self._globals: dict[str, Any] = {}
        for statement in module.body:
            if _readable(statement):
                self._do(statement, self._globals)
            elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                # A statement that is not done may give a name another value: none is better than the one before it.
                for name in _stored(statement):
                    self._globals.pop(name, None)

    def call(self, name: str) -> Any:
        """What a function without arguments returns.

        Raises:
            ConfigError: a statement that is no assignment or arithmetic, with its line.
        """
        function = self.functions[name]
        if name in self._stack or len(self._stack) >= _DEEPEST:
            raise self._refused(function, f"{name} calls itself")
        if function.args.args or function.args.kwonlyargs or function.args.vararg:
            raise self._refused(function, f"{name} takes arguments")
        self._stack.append(name)
        names = dict(self._globals)
        try:
            result = next(filter(None, (self._do(each, names) for each in function.body)), (None,))[0]
        except RecursionError:
            raise self._refused(function, "an expression is nested too deeply") from None
        self._stack.pop()
        self.names = names
        return result

    def _refused(self, node: ast.AST, reason: str) -> ConfigError:
        return ConfigError(f"{self.file}, line {getattr(node, 'lineno', '?')}: {reason}; {_REMEDY}")

    def _do(self, statement: ast.stmt, names: dict[str, Any]) -> tuple[Any] | None:
        """Do a statement; the value of a `return`, in a tuple."""
        match statement:
            case ast.Return(value=value):
                return (None if value is None else self._value(value, names),)
            case ast.Assign(targets=targets, value=value):
                result = self._value(value, names)
                for target in targets:
                    self._assign(target, result, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value, names), names)
            case ast.AugAssign(target=ast.Name() | ast.Attribute() as target, op=op, value=value):
                old, new = self._value(target, names), self._value(value, names)
                self._assign(target, self._operate(statement, op, old, new), names)
            case ast.Assert(test=test):
                if not self._value(test, names):
                    raise self._refused(statement, f"its own check fails: {ast.unparse(test)}")
            case ast.If(test=test, body=body, orelse=other):
                for each in body if self._value(test, names) else other:
                    if (returned := self._do(each, names)) is not None:
                        return returned
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                raise self._refused(statement, f"{ast.unparse(statement).splitlines()[0]!r} cannot be read")
        return None

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
                return
            case (
                ast.Attribute(value=holder, attr=name)
                | ast.Subscript(value=holder, slice=ast.Constant(value=str(name)))
            ):
                node = self._value(holder, names)
                if isinstance(node, dict):
                    node[name] = value
                    self.assigned.add((id(node), name))
                    return
        raise self._refused(target, f"{ast.unparse(target)} cannot be assigned to")

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Attribute(value=holder, attr=name):
                return self._member(node, self._value(holder, names), name)
            case ast.Subscript(value=holder, slice=ast.Constant(value=key)):
                return self._member(node, self._value(holder, names), key)
            case ast.Tuple(elts=parts):
                return tuple(self._value(part, names) for part in parts)
            case ast.List(elts=parts):
                return [self._value(part, names) for part in parts]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                given = [self._value(key, names) for key in keys if key is not None]
                if not all(isinstance(key, str | int | float | None) for key in given):
                    raise self._refused(node, f"{ast.unparse(node)!r}: a key must be a text or a number")
                return dict(zip(given, [self._value(value, names) for value in values], strict=True))
            case ast.BinOp(left=left, op=op, right=right):
                return self._operate(node, op, self._value(left, names), self._value(right, names))
            case ast.UnaryOp(op=op, operand=operand):
                return self._operate(node, op, self._value(operand, names), None)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._operate(node, op, self._value(left, names), self._value(right, names))
            case ast.BoolOp(op=op, values=parts):
                # As in Python, the value of a part and not whether it is true: save_dir = "" or "logs".
                for part in parts[:-1]:
                    result = self._value(part, names)
                    if bool(result) is isinstance(op, ast.Or):
                        return result
                return self._value(parts[-1], names)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test, names) else other, names)
            case ast.JoinedStr(values=parts):
                texts = [str(self._value(part, names)) for part in parts]
                return self._computed(node, lambda: "".join(texts))
            case ast.FormattedValue(value=value, format_spec=None):
                return self._value(value, names)
            case ast.Call():
                return self._called(node, names)
        raise self._refused(node, f"{ast.unparse(node)!r} cannot be read")

    def _member(self, node: ast.expr, holder: Any, key: Any) -> Any:
        try:
            return holder[key]
        except (KeyError, IndexError, TypeError):
            raise self._refused(node, f"{ast.unparse(node)} is not set") from None

    def _called(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        if name in _DICTS and not node.args and not node.keywords:
            return Node()
        if name in self._calls and not node.args and not node.keywords:
            return self._calls[name]()
        if name in self.functions and not node.args and not node.keywords:
            return self.call(name)
        if name not in _FUNCTIONS or any(word.arg is None for word in node.keywords):
            raise self._refused(node, f"the call {name}(...) cannot be read")
        words = {str(word.arg): self._value(word.value, names) for word in node.keywords}
        arguments = [self._value(argument, names) for argument in node.args]
        return self._computed(node, lambda: _FUNCTIONS[name](*arguments, **words))

    def _operate(self, node: ast.AST, op: ast.AST, left: Any, right: Any) -> Any:
        if type(op) not in _OPERATIONS or (isinstance(op, ast.Mult | ast.Mod) and not _numbers(left, right)):
            raise self._refused(node, f"{ast.unparse(node)!r} cannot be read")
        return self._computed(node, lambda: _OPERATIONS[type(op)](left, right))

    def _computed(self, node: ast.AST, compute: Callable[[], Any]) -> Any:
        try:
            result = compute()
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refused(node, f"{ast.unparse(node)!r}: {error}") from None
        if isinstance(result, int | float) and not abs(result) <= _LARGEST:
            raise self._refused(node, f"{ast.unparse(node)!r} is too large")
        if isinstance(result, str | list | tuple) and len(result) > _LONGEST:
            raise self._refused(node, f"{ast.unparse(node)!r} is too long")
        return result


def _readable(statement: ast.stmt) -> bool:
    """Whether a statement outside of functions is done; one that calls something may be of no interest."""
    match statement:
        case (
            ast.Assign(value=value)
            | ast.AnnAssign(target=ast.Name(), value=ast.expr() as value)
            | ast.AugAssign(target=ast.Name(), value=value)
        ):
            return not isinstance(value, ast.Call)
    return False


def _stored(statement: ast.stmt) -> set[str]:
    """Names that a statement may set."""
    return {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, tuple[int, str, Any]]:
    """Dotted key -> (id of its node, its name, its value); plain dicts are values."""
    result: dict[str, tuple[int, str, Any]] = {}
    for name, value in tree.items():
        if isinstance(value, Node) and value:
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = (id(tree), name, {} if isinstance(value, Node) else value)
    return result
