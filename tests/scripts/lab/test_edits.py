"""The lab's section on edits: copies, halves of the accuracy, operations; and pairs that need no sampling."""

import argparse
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import edited_shapes
from flowrl.rewards import shapes_edit
from scripts.lab import edits, page
from scripts.pretraining import edit_prompts
from tests import toys


def number(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02, "n": 500}


def cell(gain: float, recolor: float) -> dict[str, Any]:
    names = ("edit_strict", "edit_follows", "edit_keeps", "edit_unchanged")
    summary = {
        "base": {name: number(0.4) for name in names},
        "tuned": {name: number(0.4 + gain) for name in names},
        "difference": {name: number(gain) for name in names},
        "operations": {"base": {"recolor": 0.5, "add": 0.25}, "tuned": {"recolor": recolor, "add": 0.3}},
        "evaluations": {"rollout": 5.0, "train": 0.1},
        "iterations": 80,
        "cpu_seconds": 300.0,
        "seconds": 160.0,
        "base_best_guidance": {"edit_strict": number(0.4), "guidance_scale": 1.0},
    }
    return {"summary": summary, "commit": "abc"}


def test_the_section_has_gains_copies_and_operations():
    cells: dict[int, dict[str, Any] | None] = {0: cell(0.1, 0.6), 1: cell(0.12, 0.7), 2: None}
    entry = page.Entry("edit-awm", "tested", False, cells, metric=page.EDIT)
    lines = edits.edits_section([entry])
    assert "the 500 held-out edits" in "\n".join(lines)
    assert "| edit-awm | tested | +11.0 | -1.7 to +23.7 | +8.0 | 2 of 3 | 80 | 5.00 + 0.10 | 300 |" in lines
    change = "+10.0 [+8.0, +12.0]"
    assert f"| edit-awm | 0 | 40.0 | 50.0 | {change} | {change} | {change} |" in lines
    assert lines[-2:] == ["| base | 50 | 25 |", "| edit-awm | 65 | 30 |"]
    assert edits.edits_section([page.Entry("edit-awm", "tested", False, {0: None}, metric=page.EDIT)]) == []
    images = page.Entry("quickstart", "tested", False, {0: None})
    assert "| edit-awm |" not in page.page([images, entry], lines).partition("## Editing")[0]


def test_accuracy_by_operation_is_of_its_edits_alone():
    prompts = ("make the red circle blue", "remove the red circle", "make the green cross red")
    scores = {"edit_strict": np.asarray([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])}
    found = edits.by_operation(toys.evaluation("base", 1, 1.0, 10, prompts, 2, scores))
    assert found == {"recolor": 0.25, "remove": 1.0}


def test_pairs_without_sampling_are_the_right_result_against_the_source(tmp_path):
    options = argparse.Namespace(out=tmp_path, seed=3, operations=edited_shapes.OPERATIONS, count=14)
    edit_prompts.write_pairs(options)
    records = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [record["operation"] for record in records] == [*edited_shapes.OPERATIONS] * 2
    judge = shapes_edit.build(shapes_edit.Config())
    for side, expected in (("chosen", (1.0, 0.0)), ("rejected", (0.0, 1.0))):
        images = [np.asarray(Image.open(tmp_path / record[side])) / 255.0 for record in records]
        batch = np.stack(images).transpose(0, 3, 1, 2).astype(np.float32)
        metadata = [{"images": [str(tmp_path / record["image"])]} for record in records]
        scores = judge.score(torch.from_numpy(batch), [record["prompt"] for record in records], metadata)
        assert isinstance(scores, dict)
        for name, value in zip(("edit_strict", "edit_unchanged"), expected, strict=True):
            assert scores[name].tolist() == pytest.approx([value] * len(records))
    first = (tmp_path / "images" / "00000-result.png").read_bytes()
    edit_prompts.write_pairs(options)
    assert (tmp_path / "images" / "00000-result.png").read_bytes() == first
