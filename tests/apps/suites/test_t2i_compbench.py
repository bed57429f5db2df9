"""T2I-CompBench: categories from their files, noun phrases, the folder of the official tools and their results."""

import json
from pathlib import Path

import pytest

from flowrl.apps.suites import t2i_compbench
from flowrl.apps.suites.running.exchange import require_each_once
from flowrl.core.errors import ConfigError
from tests.apps.suites.written import means, official, rows_of
from tests.tiny_suites import t2i_compbench as tiny


@pytest.fixture
def items(tmp_path):
    return t2i_compbench.items(tiny.prompts(tmp_path))


def test_each_category_has_its_file_and_its_questions(items, tmp_path):
    assert [item.id for item in items[:3]] == ["color-000", "color-001", "shape-000"]
    asked = {item.tags[0]: item.metadata["questions"] for item in items if item.id.endswith("000")}
    assert asked["color"] == ["a green bench?", "a blue bowl?"]
    assert asked["shape"] == ["an oval plate?", "a square box?"]
    assert asked["texture"] == ["rubber gloves?", "a glass jar?"]
    assert asked["complex"] == ["The black cat sits on the soft, red chair?"]
    only = t2i_compbench.items(tmp_path / "dataset" / "numeracy_val.txt")
    assert [item.id for item in only] == ["numeracy-000", "numeracy-001"]
    copy = (tmp_path / "dataset" / "3d_spatial_val.txt").rename(tmp_path / "t2i_compbench_3d_spatial_val.txt")
    assert [item.tags for item in t2i_compbench.items(copy)] == [("3d_spatial",)] * 2
    copy.rename(tmp_path / "dataset" / "3d_spatial_val.txt")
    (tmp_path / "dataset" / "shape_val.txt").unlink()
    with pytest.raises(ConfigError, match=r"has no shape_val\.txt; give the folder with the eight"):
        t2i_compbench.items(tmp_path / "dataset")
    with pytest.raises(ConfigError, match="is no file of a category"):
        t2i_compbench.items(Path(__file__))


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("a metallic desk lamp and a fluffy sweater", ["a metallic desk lamp", "a fluffy sweater"]),
        ("the man in the red hat, a blue car and three dogs", ["the man", "the red hat", "a blue car", "three dogs"]),
        ("The round clock is mounted on the rectangular wall.", ["The round clock", "the rectangular wall"]),
        ("and of", ["and of"]),
    ],
)
def test_noun_phrases_by_the_plain_rule(text, phrases):
    assert t2i_compbench.noun_phrases(text) == phrases


def test_phrases_are_multiplied_and_there_is_no_single_number(items):
    answers = {("color-000", 0): [0.5, 0.5], ("color-000", 1): [1.0, None], ("color-001", 0): [1.0, 0.75]}
    answers |= {("spatial-000", 0): [0.25]}
    table = t2i_compbench.aggregate(rows_of(items, answers, t2i_compbench.from_answers), items)
    assert means(table) == {"color": pytest.approx(0.5), "spatial": pytest.approx(0.25)}
    assert table.headline == ""
    assert (table.lines[0].n_images, table.lines[0].n_scored) == (3, 2)


def write_results(folder, items, samples):
    return tiny.results(folder, [(item, k, t2i_compbench.layout(item, k)) for item in items for k in range(samples)])


@pytest.mark.parametrize("samples", [10, 3])
def test_results_of_every_tool_find_their_sample_again(items, tmp_path, samples):
    found = t2i_compbench.read_results(write_results(tmp_path, items, samples), items)
    require_each_once(found, items, samples, "--results")
    assert found["texture-001", 2] == {"t2i_compbench": pytest.approx(1.2)}
    assert found["numeracy-001", 2] == {"t2i_compbench": pytest.approx(1.2)}
    mean = 0.5 + sum(range(samples)) / samples / 10
    assert means(t2i_compbench.aggregate(official(found), items))["3d_spatial"] == pytest.approx(mean)


def test_results_of_another_form_are_named(items, tmp_path):
    out = write_results(tmp_path, items, 2)
    file = out / "numeracy" / t2i_compbench.RESULTS["numeracy"]
    # Of a tool that ranks images, where a place from the end would be another prompt's.
    ranked = out / "color" / t2i_compbench.RESULTS["color"]
    kept = ranked.read_text()
    ranked.write_text(json.dumps([{"question_id": number - 1, "answer": 1.0} for number in range(4)]))
    with pytest.raises(ConfigError, match="question_id=-1 must be a number from 0"):
        t2i_compbench.read_results(out, items)
    ranked.write_text(kept)
    file.write_text("[{}]")
    with pytest.raises(ConfigError, match="must be a list of objects with question_id and answer"):
        t2i_compbench.read_results(out, items)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        t2i_compbench.read_results(out, items)
    file.unlink()
    with pytest.raises(ConfigError, match="run the official tool of the category numeracy"):
        t2i_compbench.read_results(out, items)


def test_the_layout_is_the_tools_and_what_they_cannot_read_is_refused(items):
    assert t2i_compbench.layout(items[1], 3) == "color/samples/a green bench and a blue bowl again_000013.png"
    with pytest.raises(ConfigError, match="give --samples 10"):
        t2i_compbench.layout(items[0], 10)
    with pytest.raises(ConfigError, match="holds / or _"):
        t2i_compbench.layout(t2i_compbench.Item("color-000", "a_b"), 0)
