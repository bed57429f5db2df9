"""Names of a module computed from its source alone, without importing what the rest of the file needs.

A list of components shows their levels and cards; importing all of them would load torch, which takes seconds. Of a
file only the statements run that the name depends on, and of an import of `package` only the names that are used. What
a file changes without binding a name, such as `LIST.append(x)`, is left out.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_READ = {"ClassVar", "InitVar", "KW_ONLY"}
"""Names that a dataclass reads from annotations."""


class Excerpt:
    """The top level of a module of which names are computed one by one.

    Args:
        module: dotted name; its parent packages are imported.
        package: modules below it are read in the same way where this one imports from them; others are imported.

    Raises:
        ModuleNotFoundError: there is no such module with a source file.
    """

    def __init__(self, module: str, package: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no source of {module}", name=module)
        self.package, self._file = package, Path(spec.origin)
        tree = ast.parse(self._file.read_bytes())
        self.about = ast.get_docstring(tree)
        """Docstring of the module; None: it has none."""
        self._statements = tree.body
        self._defined: dict[str, list[int]] = {}
        for number, statement in enumerate(tree.body):
            for name in _bound(statement):
                self._defined.setdefault(name, []).append(number)
        # dataclasses look the module of a class up.
        own = sys.modules[f"{module} (excerpt)"] = ModuleType(f"{module} (excerpt)")
        own.__file__, self._values = spec.origin, vars(own)
        self._done: set[tuple[int, str]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._defined

    def value(self, name: str) -> Any:
        """The value of a name at the end of the file.

        Raises:
            KeyError: the file does not define it.
            Exception: whatever its statements raise.
        """
        needed: set[tuple[int, str]] = set()
        waiting = [name]
        seen = set[str]()
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            for number in self._defined.get(each, ()):
                statement = self._statements[number]
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    needed.add((number, each))
                else:
                    needed.add((number, ""))
                    waiting += _used(statement)
        for number, each in sorted(needed - self._done):
            self._run(self._statements[number], each)
            self._done.add((number, each))
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """`value` of a name that the file defines, else the default."""
        return self.value(name) if name in self else default

    def _run(self, statement: ast.stmt, name: str) -> None:
        """Run a statement; of an import the part that binds `name`."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            alias = next(alias for alias in statement.names if _name(alias) == name)
            if isinstance(statement, ast.ImportFrom):
                source = statement.module or ""
                if f"{source}.".startswith(f"{self.package}.") and alias.name in (
                    part := excerpt(source, self.package)
                ):
                    self._values[name] = part.value(alias.name)
                    return
                statement = ast.ImportFrom(statement.module, [alias], statement.level)
            else:
                statement = ast.Import([alias])
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        tree = ast.fix_missing_locations(ast.Module([future, statement], []))
        exec(compile(tree, str(self._file), "exec"), self._values)


@functools.cache
def excerpt(module: str, package: str) -> Excerpt:
    """The `Excerpt` of a module, the same at every call."""
    return Excerpt(module, package)


def _name(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _bound(statement: ast.AST) -> Iterator[str]:
    """Names that a statement of the top level binds, also inside its `if` or `try`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from map(_name, statement.names)
    elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return  # names of annotations
    else:
        yield from {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for inner in (node for node in ast.walk(statement) if isinstance(node, ast.stmt) and node is not statement):
            if not isinstance(inner, ast.Expr | ast.Assign):
                yield from _bound(inner)


def _used(node: ast.AST) -> Iterator[str]:
    """Names that a statement reads, but those of annotations, which are not evaluated."""
    if isinstance(node, ast.Name):
        yield node.id
    unread: ast.expr | None = None
    if isinstance(node, ast.arg | ast.AnnAssign):
        unread = node.annotation
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        unread = node.returns
    for inner in ast.iter_child_nodes(node):
        names = _used(inner)
        yield from names if inner is not unread else _READ.intersection(names)
