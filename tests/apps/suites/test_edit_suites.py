"""Suites of edits: their forms, the source on its way, the official means."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.apps.suites import gedit, imgedit
from flowrl.apps.suites._reading import Scores
from flowrl.apps.suites.running.drawing import Drawing
from flowrl.apps.suites.running.exchange import export
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.runner import Task, fill
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Row, load_suite
from tests.apps.suites.written import means
from tests.tiny_rewards.edit_score import save_source
from tests.tiny_suites import gedit as tiny_gedit
from tests.tiny_suites import imgedit as tiny_imgedit


class Shown:
    """A pipeline that returns its source, made to the size asked for and a little brighter."""

    def __init__(self) -> None:
        self.components: dict[str, object] = {}
        self.calls: list[tuple[list[str], int]] = []

    def __call__(self, image, prompt, generator, output_type, return_dict, width=8):
        assert len(prompt) == len(generator) == 1, "sizes of a batch would be those of its first image"
        grey = image.getpixel((0, 0))[0]
        self.calls.append((prompt, grey))
        return (torch.full((1, 3, 4, width + (grey - 70)), (grey + 1) / 255),)


def drawn(suite: str, prompts: Path, folder: Path, samples: int = 1) -> tuple[Task, ResultsFolder, Shown]:
    of = load_suite(suite)
    task = Task(suite=of, items=of.items(prompts), samples=samples, batch_size=3)
    results, pipeline = ResultsFolder(folder, False), Shown()
    results.begin({"model": "tiny"}, {}, {})
    draw = Drawing(pipeline, {})
    draw.require_inputs(task.items)
    fill(task, results, draw, None)
    return task, results, pipeline


# ---- GEdit


def test_each_edit_of_gedit_is_drawn_from_its_own_source_and_exported_beside_it(tmp_path):
    task, folder, pipeline = drawn("gedit", tiny_gedit.prompts(tmp_path), tmp_path / "out")
    assert sorted(pipeline.calls) == sorted(([edit[2]], 70 + n) for n, edit in enumerate(tiny_gedit.EDITS))
    out = tmp_path / "official"
    assert export(task, folder, out) == 5
    for number, (key, group, _, language, _) in enumerate(tiny_gedit.EDITS):
        place = out / "fullset" / group / language
        with Image.open(place / f"{key}.png") as edited, Image.open(place / f"{key}_SRCIMG.png") as source:
            seen = [np.asarray(image)[0, 0, 0] for image in (edited, source)]
            assert seen == [71 + number, 70 + number]
            assert edited.width == 8 + number, "sizes may differ"
            assert source.format == "PNG"


def test_the_means_of_gedit_are_over_groups_for_both_sets_and_each_language(tmp_path):
    items = gedit.items(tiny_gedit.prompts(tmp_path))
    grades = {"a1-en": (4, 9), "a1-cn": (1, 4), "b2-en": (9, 4), "c3-en": (0, 9), "d4-en": (8, 2)}
    names = ("sc", "pq")
    rows = []
    for item in items:
        scores: Scores = {f"gedit_{n}": float(v) for n, v in zip(names, grades[item.id], strict=True)}
        rows.append(Row(item.id, item.text, 0, scores=scores | {"gedit": math.sqrt(math.prod(grades[item.id]))}))
    table = gedit.aggregate(rows, items)
    found = means(table)
    # Two edits with one instruction are two: (6 + 6) / 2, and not one of them.
    assert found["en color_alter"] == pytest.approx(6)
    assert found["en overall of 3 groups"] == pytest.approx((6 + 0 + 4) / 3)
    assert found["en semantics of 3 groups"] == pytest.approx((6.5 + 0 + 8) / 3)
    assert found["en quality of 3 groups"] == pytest.approx((6.5 + 9 + 2) / 3)
    assert found["en overall of 3 groups, intersection"] == pytest.approx((6 + 0) / 2)
    assert found["cn overall of 1 groups"] == pytest.approx(2)
    assert table.headline == "en overall of 3 groups"
    assert {line.name: line.n_prompts for line in table.lines}["en color_alter"] == 2


def test_the_judge_of_edits_gives_gedit_the_same_table(tmp_path):
    items = gedit.items(tiny_gedit.prompts(tmp_path))
    scores: Scores = {"edit_score": 6.0, "edit_score_sc": 4.0, "edit_score_pq": 9.0, "edit_score_kept": 4.0}
    found = means(gedit.aggregate([Row(item.id, item.text, 0, scores=scores) for item in items], items))
    assert (found["en overall of 3 groups"], found["en semantics of 3 groups"], found["en color_alter"]) == (6, 4, 6)


@pytest.mark.parametrize(
    ("column", "value"), [("sementics_score", "11"), ("quality_score", ""), ("quality_score", "-1")]
)
def test_a_grade_of_gedit_that_is_none_is_missing(tmp_path, column, value):
    items = gedit.items(tiny_gedit.prompts(tmp_path))
    file = tiny_gedit.results(tmp_path, [(item, 0, gedit.layout(item, 0)) for item in items])
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert gedit.read_results(file, items)["a1-en", 0] == {"gedit": 4.0, "gedit_sc": 2.0, "gedit_pq": 8.0}
    rows[0][column] = value
    file.unlink()
    with (tmp_path / "mine_color_alter_gpt_score.csv").open("w", newline="") as text:
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    found = gedit.read_results(tmp_path, items)
    assert found["a1-en", 0]["gedit"] is None
    assert found["b2-en", 0]["gedit"] == pytest.approx(math.sqrt(4 * 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_type": "mine"}, "task_type='mine' is none of background_change"),
        ({"instruction_language": "zh"}, "instruction_language='zh' is none of en, cn"),
        ({"key": "b2"}, "key='b2' occurs twice in en"),
        ({"key": None}, "has no 'key'; accepted: the data set's folder"),
        ({"input_image_raw": "gone.png"}, "there is no image 'gone.png'"),
        ({"instruction": " "}, "must be a text that is not empty"),
    ],
)
def test_a_wrong_record_of_gedit_is_named(tmp_path, change, message):
    file = tiny_gedit.prompts(tmp_path)
    first, *others = [json.loads(line) for line in file.read_text().splitlines()]
    first = {key: value for key, value in (first | change).items() if value is not None}
    file.write_text("".join(json.dumps(record) + "\n" for record in (first, *others)))
    with pytest.raises(ConfigError, match=message):
        gedit.items(file)


# ---- ImgEdit


def test_the_folder_of_imgedit_has_a_file_a_number_and_the_list_of_what_is_in_it(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    task, folder, pipeline = drawn("imgedit", tiny_imgedit.prompts(given), tmp_path / "out")
    assert len(pipeline.calls) == 3
    export(task, folder, tmp_path / "official")
    assert {file.name for file in (tmp_path / "official").iterdir()} == {
        *(f"{n}.png" for n in (1082, 97, 98)),
        "basic_edit.json",
    }
    assert json.loads((tmp_path / "official" / "basic_edit.json").read_text()) == tiny_imgedit.RECORDS
    with pytest.raises(ConfigError, match="imgedit reads one image of each prompt"):
        imgedit.layout(task.items[0], 1)


def test_the_overall_score_of_imgedit_is_the_mean_of_its_types(tmp_path):
    items = imgedit.items(tiny_imgedit.prompts(tmp_path))
    assert [item.tags for item in items] == [("adjust",), ("add",), ("add",)]
    values = {"1082": 2.0, "97": 3.0, "98": 5.0}
    table = imgedit.aggregate([Row(i.id, i.text, 0, scores={"imgedit": values[i.id]}) for i in items], items)
    assert means(table) == {"add": 4, "adjust": 2, "overall of 2 types": 3, "all edits": pytest.approx(10 / 3)}
    # Both have the instruction "Add a lamp.", and are two edits.
    assert table.lines[0].n_prompts == 2
    assert table.headline == "overall of 2 types"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (tiny_imgedit.ANSWER, 4),
        ("Style Fidelity: 1\r\nContent Preservation: 5\r\nRendering Quality: 5", 11 / 3),
        ("A: 1\nB: 2", None),
        ("A: 1\nB: 2\nC: 6", None),
        ("A: 45\nB: 2\nC: 3", None),
        ("A: 1\nB: 2\nC: 3\nD: 4", None),
        ("A: 1/5\nB: 2/5\nC: 3/5", None),
        ("", None),
        ({"error": "timeout"}, None),
        (3.33, 3.33),  # of the official step 1
        (0, None),
    ],
)
def test_an_answer_of_the_judge_of_imgedit_counts_with_its_three_grades(tmp_path, answer, value):
    items = imgedit.items(tiny_imgedit.prompts(tmp_path))
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"97": answer}))
    expected = None if value is None else pytest.approx(value)
    assert imgedit.read_results(file, items) == {("97", 0): {"imgedit": expected}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"1": {"id": "a.png", "prompt": "x"}}', "needs id, prompt and edit_type"),
        ('{"1": {"id": "a.png", "prompt": "x", "edit_type": "mine"}}', "edit_type='mine' is none of add, adjust"),
        ('{"1": {"id": "a.png", "prompt": "x", "edit_type": ["add"]}}', "is none of add, adjust"),
        ('{"1": {"id": "gone.png", "prompt": "x", "edit_type": "add"}}', "there is no image 'gone.png'"),
        ('{"1": {"id": "basic_edit.json", "prompt": "x", "edit_type": "add"}}', "cannot be read as an image"),
        ('{"1": {}, "1": {}}', "'1' occurs twice"),
        ("[]", "must be an object"),
        ("{", "is not JSON"),
        (3000 * "[", "is not JSON: it is nested too deeply"),
        ('{"1": ' + 5000 * "9", "is not JSON"),
    ],
)
def test_a_wrong_list_of_imgedit_is_named(tmp_path, text, message):
    save_source(tmp_path, name="a.png")
    (tmp_path / "basic_edit.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        imgedit.items(tmp_path)


def test_a_folder_without_the_list_of_imgedit_says_what_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"holds 0 of basic_edit\.json, singleturn\.json"):
        imgedit.items(tmp_path)


# ---- models


def test_a_model_of_texts_alone_is_refused_for_edits(tmp_path):
    class Painter:
        def __call__(self, prompt, generator):
            raise AssertionError

    class Editor:
        def __call__(self, image, prompt, generator):
            raise AssertionError

    items = imgedit.items(tiny_imgedit.prompts(tmp_path))
    with pytest.raises(ConfigError, match="Painter takes no image; this suite needs a model that edits"):
        Drawing(Painter(), {}).require_inputs(items)
    Drawing(Editor(), {}).require_inputs(items)
    with pytest.raises(ConfigError, match="Editor needs an image to begin with"):
        Drawing(Editor(), {}).require_inputs([])
