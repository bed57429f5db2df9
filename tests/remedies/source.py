"""Places of the source that make a remedy."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [file for folder in ("flowrl", "rewards") for file in sorted((ROOT / folder).rglob("*.py"))]


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


@cache
def places(file: Path) -> dict[tuple[int, int, int, int], str]:
    """(first line, last line, first column, last column) of each `Remedy(...)` of a file -> its place for `follows`."""
    result, seen = dict[tuple[int, int, int, int], str](), Counter[str]()
    for name, node in functions(parsed(file)):
        if isinstance(node, ast.Call) and called(node) == "Remedy":
            seen[name] += 1
            number = f"#{seen[name]}" if seen[name] > 1 else ""
            place = f"{file.relative_to(ROOT)}:{name}{number}"
            result[node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0] = place
    return result
