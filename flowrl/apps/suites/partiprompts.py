"""PartiPrompts (P2): 1632 prompts, each of one of 12 categories and one of 11 challenges.

The paper's result is a win rate by human raters: give --base, and the table has the win rate by each score.

Source: arXiv:2206.10789; google-research/parti.
"""

from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._preference import table_of
from flowrl.apps.suites._reading import FORMS, column_of, facts_of, id_of, prompts_of
from flowrl.evaluation.suite import Item, Row, Table, require_path

LEVEL = "tested"
FACTS = facts_of("partiprompts", LEVEL)


def items(path: Path | None) -> list[Item]:
    """The prompts of a file; the tags are category and challenge, "" where it has no such column."""
    file = require_path(path, "partiprompts", FACTS, FORMS)
    return [
        Item(id_of(text), text, record, (column_of(record, "category"), column_of(record, "challenge")))
        for text, record in prompts_of(file, f"--prompts {file}")
    ]


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Each score over all images, by category and by challenge."""
    return table_of(rows, items, (0, 1))
