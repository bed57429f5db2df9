"""DrawBench: 200 prompts of 11 categories, judged by scores of preference and alignment.

It has no training split, so it is a good hold-out for training on other prompts. A score is the mean over images.

Source: arXiv:2205.11487.
"""

from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._preference import table_of
from flowrl.apps.suites._reading import FORMS, column_of, facts_of, id_of, prompts_of
from flowrl.evaluation.suite import Item, Row, Table, require_path

LEVEL = "tested"
FACTS = facts_of("drawbench", LEVEL)


def items(path: Path | None) -> list[Item]:
    """The prompts of a file, with their categories where it has a column of them."""
    file = require_path(path, "drawbench", FACTS, FORMS)
    return [
        Item(id_of(text), text, record, (category,) if (category := column_of(record, "category")) else ())
        for text, record in prompts_of(file, f"--prompts {file}")
    ]


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Each score over all images, and by category."""
    return table_of(rows, items)
