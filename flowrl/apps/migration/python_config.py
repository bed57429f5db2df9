"""A Python configuration of flow_grpo, read as a syntax tree and never executed: assignments, arithmetic, conditions,
`while`, and calls of the file's own functions with their arguments.
"""

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.apps.migration.python_values import DICTS, FUNCTIONS, OPERATIONS, Function, Node, nests, signature
from flowrl.apps.migration.table import REMEDY
from flowrl.core.errors import ConfigError
from flowrl.core.strict import read_text

_LARGEST = 10**18
_LONGEST = 10_000
_DEEPEST = 20
_NESTED = 5
"""Levels of lists and dictionaries in a value."""
_MOST = 10_000
"""Calls and rounds of loops of a file."""
_End = tuple[Any] | ast.Break | ast.Continue | None
"""What ends a block early: the value of a `return`, in a tuple, or a jump of the loop around it."""


class Reader:
    """The functions of one Python file. `calls`: dotted name -> what a call of it gives, such as `base.get_config`."""

    def __init__(self, file: Path, calls: dict[str, Callable[[], Any]] | None = None) -> None:
        self.file, self._calls = file, calls or {}
        self.frames: list[dict[str, Any]] = []
        """Names inside each function that was called, the one called first last."""
        self._stack: list[ast.FunctionDef] = []
        self._spent = 0
        try:
            module = ast.parse(read_text(file, str(file)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{file}: it is not valid Python: {error}") from None
        self._globals: dict[str, Any] = {}
        for statement in module.body:
            if _readable(statement):
                self._do(statement, self._globals)
            else:
                # A statement that is not done may give a name another value: none is better than the one before it.
                _forget(statement, self._globals)

    @property
    def functions(self) -> dict[str, Function]:
        """The functions that the file defines, by name."""
        return {name: value for name, value in self._globals.items() if isinstance(value, Function)}

    def call(self, name: str) -> Any:
        """What a function returns that is called without arguments.

        Raises ConfigError: a statement that cannot be read, with its line.
        """
        function = self.functions[name]
        return self._call(function, function.node, (), {})

    def _call(self, function: Function, call: ast.AST, values: tuple[Any, ...], words: dict[str, Any]) -> Any:
        node = function.node
        if node in self._stack or len(self._stack) >= _DEEPEST:
            raise self._refused(node, f"{node.name} calls itself")
        try:
            bound = function.signature.bind(*values, **words)
        except TypeError as error:
            raise self._refused(call, f"{node.name}: {error}") from None
        bound.apply_defaults()
        for value in bound.arguments.values():
            if isinstance(value, ConfigError):
                raise value
        self._spend(call)
        self._stack.append(node)
        names = function.around | bound.arguments
        try:
            end = self._block(node.body, names)
        except RecursionError:
            raise self._refused(node, "an expression is nested too deeply") from None
        self._stack.pop()
        self.frames.append(names)
        return end[0] if isinstance(end, tuple) else None

    def _defined(self, node: ast.FunctionDef, names: dict[str, Any]) -> Function:
        """A function, with its defaults as they are at its definition."""

        def default(value: ast.expr) -> Any:
            try:
                return self._value(value, names)
            except ConfigError as error:
                return error

        return Function(node, signature(node.args, default), names)

    def _spend(self, node: ast.AST) -> None:
        self._spent += 1
        if self._spent > _MOST:
            raise self._refused(node, f"it takes more than {_MOST} calls and rounds of loops")

    def _refused(self, node: ast.AST, reason: str) -> ConfigError:
        return ConfigError(f"{self.file}, line {getattr(node, 'lineno', '?')}: {reason}; {REMEDY}")

    def _block(self, statements: list[ast.stmt], names: dict[str, Any]) -> _End:
        """Do statements; what ends them early."""
        for each in statements:
            if (end := self._do(each, names)) is not None:
                return end
        return None

    def _do(self, statement: ast.stmt, names: dict[str, Any]) -> _End:
        """Do a statement; what ends the block that it stands in: the value of a `return` in a tuple, or a jump."""
        match statement:
            case ast.Break() | ast.Continue():
                return statement
            case ast.While(orelse=[]):
                return self._loop(statement, names)
            case ast.FunctionDef(name=name, decorator_list=[]):
                names[name] = self._defined(statement, names)
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
                return self._block(body if self._value(test, names) else other, names)
            case ast.Import() | ast.ImportFrom():
                _forget(statement, names)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise self._refused(statement, f"{ast.unparse(statement).splitlines()[0]!r} cannot be read")
        return None

    def _loop(self, loop: ast.While, names: dict[str, Any]) -> _End:
        while self._value(loop.test, names):
            self._spend(loop)
            match self._block(loop.body, names):
                case ast.Break():
                    break
                case (value,):
                    return (value,)
        return None

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
                return
            case ast.Tuple(elts=parts) | ast.List(elts=parts) if isinstance(value, tuple | list):
                if len(parts) == len(value):
                    for part, each in zip(parts, value, strict=True):
                        self._assign(part, each, names)
                    return
            case ast.Attribute(value=holder) | ast.Subscript(value=holder):
                node = self._value(holder, names)
                name = target.attr if isinstance(target, ast.Attribute) else self._value(target.slice, names)
                if isinstance(node, Node) and isinstance(name, str):
                    # A ConfigDict copies a dictionary that is put into it.
                    node[name] = copy.deepcopy(value) if type(value) is dict else value
                    node.assigned.add(name)
                    return
                if isinstance(node, dict) and isinstance(name, str):
                    node[name] = value
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
            case ast.Subscript(value=holder, slice=key):
                return self._member(node, self._value(holder, names), self._value(key, names))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                kind = tuple if isinstance(node, ast.Tuple) else list
                return self._computed(node, lambda: kind(self._value(part, names) for part in parts))
            case ast.Dict(keys=keys, values=values):
                return self._computed(node, lambda: self._dictionary(node, keys, values, names))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._operate(node, op, self._value(left, names), self._value(right, names))
            case ast.UnaryOp(op=op, operand=operand):
                return self._operate(node, op, self._value(operand, names), None)
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

    def _dictionary(
        self, node: ast.Dict, keys: list[ast.expr | None], values: list[ast.expr], names: dict[str, Any]
    ) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            name, found = None if key is None else self._value(key, names), self._value(value, names)
            if key is None and isinstance(found, dict):
                result |= found
            elif key is None or not isinstance(name, str | int | float | None):
                raise self._refused(node, f"{ast.unparse(node)!r}: a key must be a text or a number")
            else:
                result[name] = found
        return result

    def _member(self, node: ast.expr, holder: Any, key: Any) -> Any:
        try:
            return holder[key]
        except (KeyError, IndexError, TypeError):
            raise self._refused(node, f"{ast.unparse(node)} is not set") from None

    def _called(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        bare = not node.args and not node.keywords
        if name in DICTS and bare:
            return Node()
        if name in self._calls and bare:
            return self._calls[name]()
        function = names.get(name)
        if name not in FUNCTIONS and not isinstance(function, Function):
            raise self._refused(node, f"the call {name}(...) cannot be read")
        values = tuple(self._value(argument, names) for argument in node.args)
        words: dict[str, Any] = {}
        for word in node.keywords:
            value = self._value(word.value, names)
            more = value if word.arg is None else {word.arg: value}
            if not isinstance(more, dict) or not all(isinstance(each, str) and each not in words for each in more):
                raise self._refused(node, f"the call {name}(...) cannot be read: {ast.unparse(word)}")
            words |= more
        if isinstance(function, Function):
            return self._call(function, node, values, words)
        return self._computed(node, lambda: FUNCTIONS[name](*values, **words))

    def _operate(self, node: ast.AST, op: ast.AST, left: Any, right: Any) -> Any:
        # A text times a number may be of any length, and % fills one in.
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if type(op) not in OPERATIONS or (isinstance(op, ast.Mult | ast.Mod) and not numbers):
            raise self._refused(node, f"{ast.unparse(node)!r} cannot be read")
        return self._computed(node, lambda: OPERATIONS[type(op)](left, right))

    def _computed(self, node: ast.AST, compute: Callable[[], Any]) -> Any:
        try:
            result = compute()
        except ConfigError:
            raise
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refused(node, f"{ast.unparse(node)!r}: {error}") from None
        if nests(result, _NESTED):
            raise self._refused(node, f"{ast.unparse(node)!r} is nested too deeply")
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
        case ast.FunctionDef(decorator_list=[]):
            return True
    return False


def _forget(statement: ast.stmt, names: dict[str, Any]) -> None:
    """Drop the names that a statement may set."""
    for each in ast.walk(statement):
        match each:
            case ast.Name(id=name, ctx=ast.Store()):
                names.pop(name, None)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.pop(name, None)
            case ast.alias(name="*"):
                names.clear()
            case ast.alias(name=name, asname=own):
                names.pop(own or name.partition(".")[0], None)
