"""Two lines as those of geneval2_data.jsonl."""

from __future__ import annotations

import json
from pathlib import Path


def prompts(folder: Path) -> Path:
    file = folder / "geneval2_data.jsonl"
    records = [
        {
            "prompt": "two red cats",
            "atom_count": 3,
            "vqa_list": [
                ["How many cats are in the image?", "two"],
                ["Is any red?", "Yes"],
                ["Any cats?", "Yes"],
            ],
            "skills": ["count", "attribute", "object"],
        },
        {
            "prompt": "four dogs behind a car",
            "atom_count": 4,
            "vqa_list": [["How many dogs are in the image?", "four"], ["Are the dogs behind the car?", "Yes"]],
            "skills": ["count", "position"],
        },
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
