"""Eight files of prompts, and the results of their tools."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites.t2i_compbench import RESULTS
from flowrl.evaluation.suite import Item

TEXTS = {
    "color": "a green bench and a blue bowl",
    "shape": "an oval plate and a square box.",
    "texture": "rubber gloves and a glass jar",
    "spatial": "a cat on the left of a dog",
    "3d_spatial": "a cat in front of a dog",
    "numeracy": "three cats and two dogs",
    "non_spatial": "A man is reading a book",
    "complex": "The black cat sits on the soft, red chair",
}


def prompts(folder: Path) -> Path:
    place = folder / "dataset"
    place.mkdir(exist_ok=True)
    for name, text in TEXTS.items():
        (place / f"{name}_val.txt").write_text(f"{text}\n{text} again\n")
    return place


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    """As the tools do: BLIP, CLIP and 3-in-1 count from 0, UniDet takes the digits of the file's name."""
    out = folder / "exported"
    for name in {item.tags[0] for item, _, _ in places}:
        own = [one for one in places if one[0].tags[0] == name]
        digits = [int(place.split("_")[-1].split(".")[0]) for _, _, place in own]
        order = sorted(set(digits))
        ranked = "detection" not in RESULTS[name] and "num" not in RESULTS[name]
        rows = [
            {"question_id": order.index(digit) if ranked else digit, "answer": f"{int(item.id[-3:]) + k / 10:.4f}"}
            for digit, (item, k, _) in zip(digits, own, strict=True)
        ]
        file = out / name / RESULTS[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows))
    for file in out.rglob("vqa_result.json"):
        if file.relative_to(out).parts[0] not in {item.tags[0] for item, _, _ in places}:
            file.unlink()
    return out
