"""DPG-Bench: its file, zeroing after parents, its official table, its evaluator's files."""

import math

import pytest

from flowrl.apps.suites import dpg
from flowrl.apps.suites.running.report import compare
from tests.apps.suites.written import means, official, rows_of, scored
from tests.tiny_suites import dpg as tiny


@pytest.fixture
def items(tmp_path):
    return dpg.items(tiny.prompts(tmp_path))


def test_the_file_gives_each_prompt_its_questions_with_parents(items, tmp_path):
    assert [(item.id, item.text, item.tags) for item in items] == [
        ("a1", "text of a1", ("entity", "attribute", "global")),
        ("b2", "text of b2", ("entity", "relation")),
    ]
    assert items[1].metadata["questions"][1] == {"text": "Is the cat on the mat?", "id": 2, "parents": [1, 3]}
    assert dpg.items(tmp_path) == items, "the folder of the file does as well"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([1, 1, 1, 1], 1.0),
        ([0, 1, 1, 1], 0.25),  # no dog: neither red nor furry
        ([1, 0, 1, 1], 0.5),  # a dog that is not red leaves the dog
        ([1, 1, 0, 1], 0.75),
        ([1, 1, None, 1], None),
    ],
)
def test_a_parents_no_reaches_child_and_grandchild_and_a_childs_stays(items, answers, expected):
    given = [math.nan if value is None else value for value in answers]
    assert dpg.from_answers(given, items[0]) == {"dpg": expected}


ANSWERS = {
    ("a1", 0): [1, 1, 1, 1],
    ("a1", 1): [0, 1, 1, 0],
    ("b2", 0): [1, 1, 1],
    ("b2", 1): [1, 1, 0],
}


def test_the_total_is_the_mean_over_prompts_and_categories_are_of_all_images_after_parents(items):
    table = dpg.aggregate(rows_of(items, ANSWERS, dpg.from_answers), items)
    found = means(table)
    # a1: 1 and 0; b2: 1 and 1/3, for the cat is on a mat that is missing, which the file asks for later.
    assert dpg.from_answers([1, 1, 0], items[1]) == {"dpg": pytest.approx(1 / 3)}
    assert found["dpg"] == pytest.approx(100 * ((1 + 0) / 2 + (1 + 1 / 3) / 2) / 2)
    assert found["attribute"] == found["attribute - color"] == pytest.approx(50)
    assert found["entity"] == pytest.approx(100 * (1 + 0 + 2 + 1) / 6)
    assert found["global"] == pytest.approx(50)
    assert table.headline == "dpg"
    total = table.lines[-1]
    assert (total.n_prompts, total.n_images, total.n_scored) == (2, 4, 4)
    assert total.low <= total.mean <= total.high


def test_a_failed_image_is_missing_and_its_prompt_keeps_the_others(items):
    answers = ANSWERS | {("a1", 1): [None, 1, 1, 1]}
    table = dpg.aggregate(rows_of(items, answers, dpg.from_answers), items)
    assert means(table)["dpg"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert table.lines[-1].n_scored == 3


def test_compat_skips_the_first_row_drops_what_asks_for_it_and_takes_categories_before_parents(items):
    answers = ANSWERS | {("a1", 0): [1, 0, 1, 1], ("a1", 1): [1, 1, 1, 1]}
    table = dpg.compat(rows_of(items, answers, dpg.from_answers), items)
    found = means(table)
    # a1's second question asks for the first, which was skipped: the whole file is dropped.
    assert found["dpg (compat)"] == pytest.approx(100 * (1 + 1 / 3) / 2)
    assert found["relation"] == 100, "before parents, and of the last image alone"
    assert found["entity"] == 50
    assert "attribute" not in found
    failed = rows_of(items, answers | {("b2", 0): [1, None, 1]}, dpg.from_answers)
    assert math.isnan(means(dpg.compat(failed, items))["dpg (compat)"])


def test_compat_without_a_child_of_the_first_row_leaves_that_question_out(tmp_path):
    rows = [("a1", 1, "0", "entity - whole (dog)", "Is there a dog?"), ("a1", 2, "0", "other - count (1)", "One?")]
    items = dpg.items(tiny.prompts(tmp_path, rows))
    table = dpg.compat(rows_of(items, {("a1", 0): [0, 1]}, dpg.from_answers), items)
    assert means(table)["dpg (compat)"] == 100
    assert means(dpg.aggregate(rows_of(items, {("a1", 0): [0, 1]}, dpg.from_answers), items))["dpg"] == 50


def test_images_of_a_prompt_share_a_grid_and_the_evaluators_scores_come_back(items, tmp_path):
    assert [dpg.layout(items[0], k) for k in range(4)] == ["a1.png"] * 4
    file = tmp_path / "dpg-bench_results.txt"
    text = "out/of, all/a1.png, 0.5, 1.0, 0.75\nout/of, all/b2.png, 1.0, 0.0, 0.5\nModel: x\nDPG-Bench score: 62.5"
    file.write_text(text)
    found = dpg.read_results(file, items)
    assert found == {
        **{("a1", 0): {"dpg_official": 0.5}, ("a1", 1): {"dpg_official": 1.0}},
        **{("b2", 0): {"dpg_official": 1.0}, ("b2", 1): {"dpg_official": 0.0}},
    }
    assert means(dpg.aggregate(official(found), items)) == {"dpg": pytest.approx(62.5)}


def test_another_judge_of_which_less_is_better_wins_by_less(items):
    base, tuned = (dpg.aggregate(scored(items, [(value,)] * 2, "artifacts"), items) for value in (0.9, 0.2))
    (change,) = compare(base, tuned, {"artifacts"})
    assert (change.name, change.mean, change.win_rate) == ("dpg", pytest.approx(-70), 1.0)
