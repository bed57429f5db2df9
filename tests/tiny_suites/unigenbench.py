"""A table as test_prompts_en.csv, and the results of its evaluator."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item
from tests.tiny_suites import table


def prompts(folder: Path) -> Path:
    file = folder / "test_prompts_en.csv"
    points = [
        ["Style", "Attribute - Color", "Attribute - Size"],
        ["Attribute - Color", "Attribute - Color"],
    ]
    rows = [
        (number, f"prompt {number}", json.dumps({"Testpoints": names, "Testpoint Description": names[::-1]}))
        for number, names in enumerate(points)
    ]
    file.write_text(table(("index", "prompt_en", "sub_dims_en"), rows))
    return file


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    file = folder / "results.csv"
    rows = [
        (item.id, json.dumps({"score": [(k + n) % 2 for n in range(len(item.metadata["points"]))]}), f"out/{place}")
        for item, k, place in places
    ]
    file.write_text(table(("index", "result_json", "img_path"), rows))
    return file
