"""Edits of the lab's scenes as files, and an untrained model of edits, for the tests of what carries a source."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from flowrl import shapes
from flowrl.core.assets import asset_folder
from scripts.pretraining import edit_prompts, kontext

LENGTH = kontext.LENGTH
MODEL = (
    f"model={{name: generic, path: ./kontext, height: 32, width: 32, lora: {{rank: 2, alpha: 4}}, "
    f"call: {{max_sequence_length: {LENGTH}, _auto_resize: false}}}}"
)
"""Option of a configuration for what `write_model` saves as "kontext" beside it."""


@cache
def _drawn(count: int) -> list[edit_prompts.Pair]:
    return edit_prompts.draw("heldout", count)


def write_edits(folder: Path, count: int) -> list[dict[str, Any]]:
    """Records of `edits.jsonl` there: prompt, image (source-0.png) and operation; the right results are right-0.png."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number, pair in enumerate(_drawn(count)):
        for name, placed in (("source", pair.source), ("right", pair.result)):
            edit_prompts.as_image(shapes.render(placed, 32)).save(folder / f"{name}-{number}.png")
        records.append(
            {"prompt": pair.edit.instruction, "image": f"source-{number}.png", "operation": pair.edit.operation}
        )
    (folder / "edits.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def write_model(folder: Path) -> None:
    """An untrained FluxKontextPipeline of the lab's size."""
    vae = asset_folder("tiny-sd3", "model_index.json")
    assert vae is not None
    kontext.build_pipeline(0, vae).save_pretrained(folder)
