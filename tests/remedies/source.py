"""Places of the source that make a remedy."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for folder in ("flowrl", "rewards")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file != ROOT / "flowrl/core/errors.py"  # which makes remedies of the mappings that errors are given
]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Each node of a tree with the qualified name of the function that it stands in, in the order of the source."""
    for node in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{node.name}".lstrip(".")
        yield inner, node
        yield from functions(node, inner)


def called(node: ast.AST) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


Span = tuple[int, int, int, int]
"""(first line, last line, first column, last column)."""


def span(node: ast.Call) -> Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def settings(node: ast.AST) -> list[ast.expr]:
    """The mappings among the remedies of an error, each of which stands for a `Remedy(...)`."""
    if not isinstance(node, ast.Call) or not called(node).endswith("Error"):
        return []
    given = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "remedies")]
    listed = [each for way in given for each in (way.elts if isinstance(way, ast.List) else [way])]
    return [way for way in listed if isinstance(way.left if isinstance(way, ast.BinOp) else way, ast.Dict)]


@cache
def places(file: Path) -> dict[Span, list[str]]:
    """Span of each `Remedy(...)` of a file, or of the error with its settings -> its places for `follows`."""
    result, seen, bare = dict[Span, list[str]](), Counter[str](), dict[ast.AST, Span]()
    for name, node in functions(parsed(file)):
        bare |= {way: span(node) for way in settings(node) if isinstance(node, ast.Call)}
        if called(node) == "Remedy" or node in bare:
            seen[name] += 1
            number = f"#{seen[name]}" if seen[name] > 1 else ""
            made = bare[node] if node in bare else span(node) if isinstance(node, ast.Call) else (0, 0, 0, 0)
            result.setdefault(made, []).append(f"{file.relative_to(ROOT)}:{name}{number}")
    return result
