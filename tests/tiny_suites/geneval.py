"""Results as evaluate_images.py writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    file = folder / "results.jsonl"
    lines = [
        {"filename": f"/data/out/{place}", "tag": item.tags[0], "prompt": item.text, "correct": k % 2 == 0}
        for item, k, place in places
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
