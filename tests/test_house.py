"""The sizes that keep the house readable (docs/architecture.md, CONTRIBUTING.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flowrl"
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Parameters of a function without self and cls."""
    given = function.args
    return len([a for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")])


def of_literals(source: str) -> int:
    """Lines within displays and strings of several lines; docstrings are none."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    ends = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Constant | ast.JoinedStr)
        and id(node) not in docs
    ]
    return len({line for first, last in ends if last > first for line in range(first, last + 1)})


def test_lines_of_literals_are_counted_once_and_without_docstrings():
    assert of_literals('"""x\ny"""\na = {\n    1: (2,\n 3),\n}\nb = """c\nd"""\ne = [4]\nf = g(\n5)\n') == 6


def test_parameters_are_counted_without_self_and_with_those_by_keyword():
    (function,) = functions("class A:\n    def f(self, a, /, b, *c, d=1, **e): ...\n")
    assert parameters(function) == 3


def test_the_root_holds_few_packages_and_few_modules():
    packages = [folder for folder in PACKAGE.iterdir() if any(folder.glob("*.py"))]
    modules = [file for file in PACKAGE.glob("*.py") if not file.stem.startswith("__")]
    assert len(packages) <= 22
    assert len(modules) <= 5


def test_core_is_no_store_room():
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in (PACKAGE / "core").glob("*.py")) <= 2500


def test_what_every_reader_meets_does_not_grow():
    """Components, one file each, are read by those who use them alone (docs/decisions/structure.md)."""
    size = dict.fromkeys(("trunk", "wing"), 0)
    for file in FILES:
        place = file.relative_to(PACKAGE)
        room = str(place.parent)
        if room in ("algorithms", "samplers", "models", "apps/suites") and not place.stem.startswith(("_", "base")):
            continue
        wing = place.parts[0] in ("apps", "commands", "cli.py", "__main__.py")
        size["wing" if wing else "trunk"] += file.read_text(encoding="utf-8").count("\n")
    assert size["trunk"] <= 44_000
    assert size["wing"] <= 17_500


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_and_its_functions_are_short_and_narrow(file: Path):
    source = file.read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= 400 or (lines <= 500 and of_literals(source) > lines / 2)
    for function in functions(source):
        assert (function.end_lineno or 0) - function.lineno < 60, function.name
        # A command's parameters are its options.
        assert parameters(function) <= 8 or file.parent.name == "commands", function.name


def test_attributes_are_declared_and_seldom_asked_for_by_name():
    text = "\n".join(file.read_text(encoding="utf-8") for file in FILES)
    assert len(re.findall(r"\b(?:getattr|hasattr)\(", text)) < 60
