"""DrawBench, PartiPrompts, HPDv2 and OCR: what they read, and their tables by hand."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from flowrl.apps.suites import drawbench, hpdv2, ocr, partiprompts
from flowrl.core.errors import ConfigError
from tests.apps.suites.written import means, scored
from tests.tiny_suites import hpdv2 as tiny_hpdv2
from tests.tiny_suites import listed


def rows_of(items, values, name="pickscore"):
    return scored(items, values, name)


def test_drawbench_has_each_prompt_once_whatever_the_file(tmp_path):
    items = drawbench.items(file := listed("drawbench", tmp_path))
    with file.open() as lines:
        rows = [(row["Prompts"], (row["Category"],)) for row in csv.DictReader(lines)]
    assert [(item.text, item.tags) for item in items] == rows
    repeated = tmp_path / "test.txt"
    repeated.write_text("".join(f"{text}\n" * 5 for text, _ in reversed(rows)))
    again = drawbench.items(repeated)
    # The same prompts have the same noise, in another file and another order too.
    assert {item.id: item.text for item in again} == {item.id: item.text for item in items}
    assert {item.tags for item in again} == {()}


def test_drawbench_means_by_category_over_images(tmp_path):
    items = drawbench.items(listed("drawbench", tmp_path))
    table = drawbench.aggregate(rows_of(items, [(20, 22), (24, None), (10, 10), (0, 4)]), items)
    assert means(table) == pytest.approx(
        {"pickscore": 90 / 7, "pickscore: Colors": 22, "pickscore: Counting": 10, "pickscore: Text": 2}
    )
    assert table.headline == "pickscore"
    first = table.lines[0]
    assert (first.n_prompts, first.n_images, first.n_scored) == (4, 8, 7)


def test_partiprompts_without_categories_has_no_lines_by_them(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\na dog\n")
    items = partiprompts.items(file)
    assert list(means(partiprompts.aggregate(rows_of(items, [(1,), (2,)]), items))) == ["pickscore"]


def test_partiprompts_has_lines_by_category_and_by_challenge(tmp_path):
    items = partiprompts.items(listed("partiprompts", tmp_path))
    table = partiprompts.aggregate(rows_of(items, [(1,), (2,), (3,), (6,)]), items)
    assert means(table) == pytest.approx(
        {
            "pickscore": 3,
            **{"pickscore: Abstract": 1, "pickscore: Animals": 4, "pickscore: Artifacts": 3},
            **{"pickscore: Basic": 1.5, "pickscore: Simple Detail": 3, "pickscore: Quantity": 6},
        }
    )


OFFICIAL = (
    'Prompt\tCategory\tChallenge\tNote\na cat\tAnimals\tBasic\t\n"STOP" on a wall\tArtifacts\tText\tx\n"\tz\ty\tx\n'
)


def test_partiprompts_is_read_with_quotation_marks_at_the_start_of_a_cell(tmp_path):
    (tmp_path / "PartiPrompts.tsv").write_text(OFFICIAL)
    items = partiprompts.items(tmp_path / "PartiPrompts.tsv")
    assert [(item.text, *item.tags) for item in items] == [
        *(("a cat", "Animals", "Basic"), ('"STOP" on a wall', "Artifacts", "Text"), ('"', "z", "y")),
    ]


def test_what_other_programs_sample_a_prompt_by_is_named(tmp_path, caplog):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "seed": 1}\n{"prompt": "a dog", "height": 64}\n')
    with caplog.at_level("WARNING", logger="flowrl"):
        assert len(partiprompts.items(tmp_path / "p.jsonl")) == 2
    (told,) = caplog.messages
    assert "its records have seed, height, and no sampler reads them" in told


def test_hpdv2_is_100_times_the_mean_with_the_deviation_of_ten_chunks(tmp_path):
    items = hpdv2.items(tiny_hpdv2.prompts(tmp_path, 800))
    assert items[800].id == "concept-art-00000"
    values = np.random.default_rng(0).normal(0.28, 0.02, (4, 800))
    table = hpdv2.aggregate(rows_of(items, [(float(v),) for v in values.ravel()], "hpsv2_1"), items)
    own = means(table)
    for style, one in zip(hpdv2.STYLES, values, strict=True):
        # The official code: avg_score = [np.mean(res[i:i+80]) * 100 for i in range(0, 800, 80)].
        chunks = [np.mean(one[start : start + 80]) * 100 for start in range(0, 800, 80)]
        assert own[f"hpsv2_1: {style}"] == pytest.approx(np.mean(chunks))
        assert own[f"hpsv2_1: {style}, std of 10 chunks"] == pytest.approx(np.std(chunks))
    assert own["hpsv2_1"] == pytest.approx(100 * values.mean())
    assert table.headline == "hpsv2_1"


def test_hpdv2_of_a_part_has_no_deviation_and_says_which_styles(tmp_path):
    items = hpdv2.items(tiny_hpdv2.prompts(tmp_path))[:3]
    table = hpdv2.aggregate(rows_of(items, [(0.1,), (0.3,), (0.4,)], "hpsv2_1"), items)
    # The mean of styles, and not of images.
    assert means(table) == pytest.approx(
        {"hpsv2_1, 2 of 4 styles": 30, "hpsv2_1: anime": 20, "hpsv2_1: concept-art": 40}
    )
    (tmp_path / "photo.json").unlink()
    with pytest.raises(ConfigError, match=r"no photo.json in it; give a folder with STYLE.json.*zhwang/HPDv2"):
        hpdv2.items(tmp_path)
    (tmp_path / "photo.json").write_text(json.dumps([{"text": "a"}]))
    with pytest.raises(ConfigError, match="list of prompts"):
        hpdv2.items(tmp_path)


def test_ocr_is_the_mean_and_the_share_of_texts_read_whole(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a shop", "text": "Open"}\n{"prompt": "a sign \\"Go\\""}\n')
    items = ocr.items(file)
    assert items[0].metadata["text"] == "Open"
    table = ocr.aggregate(rows_of(items, [(1.0, 0.999), (0.5, None)], "ocr"), items)
    assert means(table) == pytest.approx({"ocr": 2.499 / 3, "whole text read": 1 / 3})
    assert len(ocr.items(Path("sd3-ocr-heldout.jsonl"))) == 96
    other = ocr.aggregate(rows_of(items, [(1.0, 0.5), (0.5, 0.5)], "mine"), items)
    assert list(means(other)) == ["mine"]
    assert not math.isnan(other.lines[0].low)
