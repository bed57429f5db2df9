"""DrawBench: 200 prompts of 11 categories, judged by scores of preference and alignment.

It has no training split, so it is a good hold-out for training on other prompts. A score is the mean over images.

Source: arXiv:2205.11487.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._preference import table_of
from flowrl.apps.suites._reading import FORMS, column_of, id_of, prompts_of
from flowrl.evaluation.suite import Facts, Item, Row, Table, require_path

LEVEL = "tested"
FACTS = Facts(
    title="DrawBench",
    source="arXiv:2205.11487",
    licence="the authors' sheet names none",
    prompts="read",
    where="hub dataset sayakpaul/drawbench (columns Prompts and Category), or github NVlabs/DiffusionNFT, "
    "dataset/drawbench/test.txt (no categories, every prompt five times)",
    images_per_prompt=1,
    judge="the rewards pickscore, image_reward, aesthetic, clip_score and hpsv2, or any other (--judge)",
    differs="scores by models in place of the paper's human raters; noise by (prompt, k); a prompt that is listed "
    "several times is taken once, so give --samples 5 for DiffusionNFT's 1000 images",
    reward=(
        {"name": "pickscore"},
        {"name": "image_reward"},
        {"name": "aesthetic"},
        {"name": "clip_score"},
        {"name": "hpsv2"},
    ),
    level=LEVEL,
    num_prompts=200,
)


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
