"""The list of all places that make a remedy, against the runs that follow them."""

import ast
import importlib
import re
from pathlib import Path

from tests.remedies import FOLLOWED
from tests.remedies.source import FILES, ROOT, called, functions, parsed, places
from tests.tables import table

for module in sorted((ROOT / "tests").rglob("test_*.py")):  # also those that follow a remedy in a test of their own
    if module != Path(__file__) and "@follows(" in module.read_text(encoding="utf-8"):
        importlib.import_module(".".join(module.relative_to(ROOT).with_suffix("").parts))

RAISED = re.compile(r"(Error|Failure|Lost)$|^(Diverged|Unfit|UnknownModel|fault|refuse|_refused|damaged|about)$")
"""Names of what carries a message, and of helpers that make one."""
# What a message says where it names something to do: an option with its value, a command with its word, a flag.
TOLD = re.compile(
    r"\b(set|use|try|give|run|train|go on|go on with|take|keep|add|or|to|leave|leave out|drop) ['`\"]?"
    r"(flowrl [a-z]|pip install|[a-z_]+(\.[a-z_0-9]+)+ ?=|--[a-z])"
    r"|\b(set|leave) (it|that|them|one) (to|out)\b|\bleave \S+ out\b|; (use|raise it|lower it|set) "
)
LEFT = table(__file__, "without_run")
"""Reason -> places that tell something to do in words alone."""


def test_every_remedy_has_a_run_that_follows_it() -> None:
    known = {place for file in FILES for found in places(file).values() for place in found}
    assert known - FOLLOWED.keys() == set()
    assert FOLLOWED.keys() - known == set(), "these places make no remedy any more"


def words(call: ast.Call) -> str:
    """The text of a message, with its values as `{}`."""
    parts: list[str] = []
    for argument in call.args:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
            elif isinstance(node, ast.FormattedValue):
                parts.append("{}")
    return "".join(parts)


def told_in_words() -> set[str]:
    """Places whose message tells an option with its value, a command or a flag, and carries no remedy."""
    found: set[str] = set()
    for file in FILES:
        for name, node in functions(parsed(file)):
            if not isinstance(node, ast.Call) or not RAISED.search(called(node)):
                continue
            carried = any(each.arg == "remedies" for each in node.keywords)
            carried |= called(node).endswith("Error") and len(node.args) > 1
            if not carried and TOLD.search(words(node)):
                found.add(f"{file.relative_to(ROOT)}:{name}".removeprefix("flowrl/"))
    return found


def test_what_a_message_tells_to_do_is_data():
    left = {place for places in LEFT.values() for place in places.split()}
    assert told_in_words() - left == set(), "carry it as a Remedy"
    assert left - told_in_words() == set(), "these tell it in words no more"
