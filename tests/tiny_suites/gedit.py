"""Five edits in the data set's columns with their sources, and the table of its evaluator."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.evaluation.suite import Item
from tests.tiny_rewards.edit_score import save_source
from tests.tiny_suites import table

EDITS = (
    ("a1", "color_alter", "make it red", "en", True),
    ("a1", "color_alter", "bian hong", "cn", True),
    ("b2", "color_alter", "make it red", "en", False),
    ("c3", "subject-add", "add a cat", "en", True),
    ("d4", "text_change", "write HI", "en", False),
)
COLUMNS = ("key", "task_type", "instruction", "instruction_language", "Intersection_exist")
OFFICIAL = (
    *("source_image", "edited_image", "instruction", "sementics_score", "quality_score"),
    *("intersection_exist", "instruction_language"),
)


def prompts(folder: Path) -> Path:
    records: list[dict[str, Any]] = [dict(zip(COLUMNS, edit, strict=True)) for edit in EDITS]
    for number, record in enumerate(records):
        save_source(folder, 70 + number, f"{number}.png", size=(32, 32))
        record["input_image_raw"] = f"{number}.png"
    file = folder / "gedit.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    """Grades of 2 and 8, of 3 and 7 and so on."""
    rows = [
        (f"/r/mine/{place[:-4]}_SRCIMG.png", f"/r/mine/{place}", item.text, 2 + n, 8 - n, "True", item.tags[0])
        for n, (item, _, place) in enumerate(places)
    ]
    file = folder / "mine_combined_gpt_score.csv"
    file.write_text(table(OFFICIAL, rows))
    return file
