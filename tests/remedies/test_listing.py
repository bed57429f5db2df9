"""The list of all places that make a remedy, against the runs that follow them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from tests.remedies import FOLLOWED
from tests.remedies.source import FILES, ROOT, called, functions, parsed, places

for module in sorted((ROOT / "tests").rglob("test_*.py")):  # also those that follow a remedy in a test of their own
    if module != Path(__file__) and "@follows(" in module.read_text(encoding="utf-8"):
        importlib.import_module(".".join(module.relative_to(ROOT).with_suffix("").parts))

FAULTS = ("ConfigError", "ModelError", "RewardError", "CheckpointError", "Diverged", "LaunchError", "ParityError")
# What a message says where it names something to do: an option with its value, or a command with its word.
TOLD = re.compile(
    r"\b(set|use|try|give|run|train|go on|go on with|take|keep|add|or) ['`\"]?"
    r"(flowrl [a-z]|pip install|[a-z_]+(\.[a-z_0-9]+)+ ?=)"
)


def test_every_remedy_has_a_run_that_follows_it() -> None:
    known = {place for file in FILES for place in places(file).values()}
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


def told_in_words() -> list[str]:
    """Raisers whose text tells an option with its value, or a command, without carrying it as data."""
    places: list[str] = []
    for file in FILES:
        for name, node in functions(parsed(file)):
            if isinstance(node, ast.Call) and called(node) in FAULTS and TOLD.search(words(node)):
                places.append(f"{file.relative_to(ROOT)}:{name}")
    return places


def test_what_a_message_tells_to_do_is_data() -> None:
    assert told_in_words() == []
