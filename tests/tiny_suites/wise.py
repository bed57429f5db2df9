"""The three lists of either protocol, and the results of its evaluator."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item


def prompts(folder: Path, *, verified: bool = False) -> Path:
    """One prompt of each category."""
    firsts = (1, 401, 521, 641, 761, 881) if verified else (1, 401, 568, 701, 801, 901)
    names = ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science")
    files = dict(zip(names, (firsts[:1], firsts[1:3], firsts[3:]), strict=True))
    place = folder / ("data_verified" if verified else "data")
    place.mkdir(exist_ok=True)
    for name, numbers in files.items():
        records = [
            {"Prompt": f"prompt {n}", "Explanation": f"it is {n}", "Category": "x", "Subcategory": "y", "prompt_id": n}
            for n in numbers
        ]
        (place / f"{name}{'_verified' * verified}.json").write_text(json.dumps(records))
    return place


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    file = folder / "all_scores_results.jsonl"
    ratings = {"consistency": 1.0, "realism": 2.0, "aesthetic_quality": 0.0}
    lines = [{"prompt_id": int(item.id), "Subcategory": "y", "score": 1} | ratings for item, _, _ in places]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
