"""A list of three edits with their sources, and the answers of its judge."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item
from tests.tiny_rewards.edit_score import save_source

RECORDS = {
    "1082": {"id": "animal/1.png", "prompt": "Make the shell smooth.", "edit_type": "alter"},
    "97": {"id": "for_add/2.png", "prompt": "Add a lamp.", "edit_type": "add"},
    "98": {"id": "for_add/3.png", "prompt": "Add a lamp.", "edit_type": "add"},
}
ANSWER = "Brief reasoning: so.\nPrompt Compliance: 5\nVisual Seamlessness: 4\nPhysical & Detail Fidelity: 3"


def prompts(folder: Path) -> Path:
    for record in RECORDS.values():
        (folder / record["id"]).parent.mkdir(exist_ok=True)
        save_source(folder, 77, record["id"], size=(32, 32))
    (folder / "basic_edit.json").write_text(json.dumps(RECORDS))
    return folder


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    file = folder / "result.json"
    answers = (f'"{Path(place).stem}": {json.dumps(ANSWER)}' for _, _, place in places)
    file.write_text(f"{{{', '.join(answers)}}}")  # a place that is given twice stands there twice
    return file
