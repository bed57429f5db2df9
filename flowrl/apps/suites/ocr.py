"""OCR: prompts that ask for a text in double quotes, which a reader looks for in the image.

A score is 1 - d / len, d being the edit distance to the target, at most its length; and the share of images in which
the whole target is read. Judge a preference score on the same images too: destroyed images may read perfectly.

Source: yifan123/flow_grpo:dataset/ocr, flow_grpo/ocr.py.
"""

from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._preference import table_of
from flowrl.apps.suites._reading import FORMS, facts_of, id_of, prompts_of
from flowrl.core.assets import embedded_prompts
from flowrl.evaluation.suite import Item, Row, Table, line, require_path, score

LEVEL = "tested"
FACTS = facts_of("ocr", LEVEL)
_OUTPUT = "ocr"


def items(path: Path | None) -> list[Item]:
    """The prompts of a file, or of a list that comes with flowrl by its name."""
    shipped = None if path is None else embedded_prompts(str(path))
    file = require_path(shipped or path, "ocr", FACTS, FORMS)
    return [Item(id_of(text), text, record) for text, record in prompts_of(file, f"--prompts {file}")]


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """The mean of each score, and the share of images in which the whole target is read."""
    table = table_of(rows, items, ())
    if not any(_OUTPUT in row.scores for row in rows):
        return table

    def whole(row: Row) -> float | None:
        value = row.scores.get(_OUTPUT)
        return None if value is None else float(value == 1.0)

    exact = line("whole text read", [rows], whole, output=_OUTPUT, bounds=(0.0, 1.0))
    mean = line(_OUTPUT, [rows], score(_OUTPUT), output=_OUTPUT, bounds=(0.0, 1.0))
    others = [one for one in table.lines if one.name != _OUTPUT]
    return Table((mean, exact, *others), _OUTPUT)
