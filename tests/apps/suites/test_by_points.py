"""GenEval 2 and UniGenBench: prompts with test points of kinds, and the means over them."""

import json
import math

import numpy as np
import pytest

from flowrl.apps.suites import geneval2, unigenbench
from flowrl.apps.suites._points import PERCENT, mean_of_parts
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Part
from tests.apps.suites.written import means, official, rows_of, scored
from tests.tiny_suites import listed, table
from tests.tiny_suites import unigenbench as tiny_unigenbench


def test_soft_tifa_takes_both_means_of_an_image_skills_over_atoms_and_atom_numbers_by_gm(tmp_path):
    items = geneval2.items(listed("geneval2", tmp_path))
    assert items[0].metadata["questions"][0] == {"text": "How many cats are in the image?", "answer": "two"}
    answers = {("00000", 0): [0.25, 1.0, 1.0], ("00001", 0): [0.5, 0.125]}
    judged = geneval2.aggregate(rows_of(items, answers, geneval2.from_answers), items)
    gm = (0.25 ** (1 / 3), 0.25)
    assert means(judged) == {
        **{"attribute": pytest.approx(100), "count": pytest.approx(37.5), "object": pytest.approx(100)},
        **{"position": pytest.approx(12.5), "3 atoms": pytest.approx(100 * gm[0]), "4 atoms": pytest.approx(25)},
        "soft_tifa_am": pytest.approx(100 * (0.75 + 0.3125) / 2),
        "soft_tifa_gm": pytest.approx(100 * sum(gm) / 2),
    }
    assert judged.headline == "soft_tifa_gm"


def test_a_failed_atom_masks_its_image_and_its_skill_has_the_others(tmp_path):
    items = geneval2.items(listed("geneval2", tmp_path))
    answers = {("00000", 0): [0.25, None, 1.0], ("00001", 0): [0.5, 0.5]}
    judged = geneval2.aggregate(rows_of(items, answers, geneval2.from_answers), items)
    found = means(judged)
    assert found["soft_tifa_gm"] == pytest.approx(50)
    assert found["count"] == pytest.approx(37.5)
    assert math.isnan(found["attribute"])
    assert judged.lines[-1].n_scored == 1


def test_another_judge_has_a_table_without_skills(tmp_path):
    items = geneval2.items(listed("geneval2", tmp_path))
    assert list(means(geneval2.aggregate(scored(items, [(0.5,)] * 2, "jpeg"), items))) == ["3 atoms", "4 atoms", "jpeg"]


def test_geneval2_says_where_its_prompts_are():
    with pytest.raises(ConfigError, match=r"CC BY-NC 4\.0.*github facebookresearch/GenEval2, file geneval2"):
        geneval2.items(None)


UNI = {("0", 0): [1, 0, 1], ("0", 1): [0, 0, 1], ("1", 0): [1, 1], ("1", 1): [0, None]}


def test_a_dimension_is_the_mean_of_its_points_and_overall_the_mean_of_the_dimensions(tmp_path):
    items = unigenbench.items(tiny_unigenbench.prompts(tmp_path))
    assert items[1].tags == ("Attribute",)
    assert items[0].metadata["questions"][0] == "Style (style of art, photography or design): Attribute - Size"
    judged = unigenbench.aggregate(rows_of(items, UNI, unigenbench.from_answers), items)
    assert means(judged) == {
        **{"Style": pytest.approx(50), "Attribute - Color": pytest.approx(40), "Attribute - Size": pytest.approx(100)},
        **{"Style (dimension)": pytest.approx(50), "Attribute (dimension)": pytest.approx(100 * 4 / 7)},
        "overall of 2 dimensions": pytest.approx((50 + 100 * 4 / 7) / 2),
        "mean of images": pytest.approx(100 * (2 / 3 + 1 / 3 + 1) / 3),
    }
    overall = judged.lines[-2]
    assert (judged.headline, overall.n_prompts, overall.n_images, overall.n_scored) == (overall.name, 2, 4, 3)


@pytest.mark.parametrize("count", [30, 200])
def test_the_interval_of_the_overall_score_draws_a_prompt_with_all_its_points(count):
    """Two dimensions with the same values: their mean varies as one does, not by the root of two less."""
    values = 100 * np.random.default_rng(0).random(count)
    one = Part({f"p{n}": (float(value),) for n, value in enumerate(values)})
    single = mean_of_parts("x", [one], count, count, bounds=PERCENT)
    double = mean_of_parts("x", [one, one], count, count, bounds=PERCENT)
    assert double.high - double.low == pytest.approx(single.high - single.low, rel=1e-6)
    assert double.mean == pytest.approx(single.mean)
    error = values.std(ddof=1) / count**0.5
    assert single.high - single.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_prompts_with_more_points_but_the_same_share_make_no_interval_wide():
    part = Part({f"p{n}": (0.0, 100.0) * n for n in range(1, 9)})
    line = mean_of_parts("x", [part, part], 8, 8, bounds=PERCENT)
    assert (line.low, line.mean, line.high) == pytest.approx((50, 50, 50))


def test_a_dimension_of_one_prompt_leaves_the_overall_score_without_an_interval():
    line = mean_of_parts("x", [Part({"p": (0.0,), "q": (100.0,)}), Part({"p": (50.0,)})], 2, 2, bounds=PERCENT)
    assert (line.mean, math.isnan(line.low), math.isnan(line.high)) == (50.0, True, True)


def test_the_official_evaluators_scores_come_back_point_by_point(tmp_path):
    items = unigenbench.items(tiny_unigenbench.prompts(tmp_path))
    file, whole = tmp_path / "results.csv", {**UNI, ("1", 1): [0, 0]}
    lines = [(key, json.dumps({"score": given}), f"out/{key}_{k}.png") for (key, k), given in whole.items()]
    file.write_text(table(("index", "result_json", "img_path"), lines))
    found = unigenbench.read_results(file, items)
    assert unigenbench.layout(items[0], 1) == "0_1.png"
    assert found["0", 0] == {"unigenbench": pytest.approx(2 / 3), "point 1": 1.0, "point 2": 0.0, "point 3": 1.0}
    judged = unigenbench.aggregate(rows_of(items, whole, unigenbench.from_answers), items)
    assert means(unigenbench.aggregate(official(found), items)) == means(judged)


@pytest.mark.parametrize("nothing", ["null", "", '{"score": null}'])
def test_an_image_whose_judge_gave_up_is_missing(tmp_path, nothing):
    """As in the official table, which has six points of colour and size then, and two of style."""
    items = unigenbench.items(tiny_unigenbench.prompts(tmp_path))
    given = {"0_0": [1, 0, 1], "0_1": [0, 0, 1], "1_0": [1, 1]}
    lines = [(json.dumps({"score": each}), f"out/{place}.png") for place, each in given.items()]
    (tmp_path / "results.csv").write_text(table(("result_json", "img_path"), [*lines, (nothing, "out/1_1.png")]))
    found = unigenbench.read_results(tmp_path / "results.csv", items)
    assert found["1", 1] == {"unigenbench": None}
    judged = unigenbench.aggregate(official(found), items)
    assert means(judged)["Attribute (dimension)"] == pytest.approx(100 * 4 / 6)
    assert means(judged)["Style (dimension)"] == pytest.approx(50)
    overall = next(line for line in judged.lines if line.name == judged.headline)
    assert (overall.n_images, overall.n_scored) == (4, 3)


def test_chinese_files_are_read_by_their_own_names(tmp_path):
    file = tmp_path / "p.csv"
    points = {"\u8003\u70b9": ["\u98ce\u683c"], "\u8003\u70b9\u5bf9\u5e94\u63cf\u8ff0": ["\u6cb9\u753b"]}
    file.write_text(table(("index", "prompt_zh", "sub_dims_zh"), [("3", "p", json.dumps(points))]), encoding="utf-8")
    (item,) = unigenbench.items(file)
    assert (item.id, item.metadata["questions"]) == ("3", ["\u98ce\u683c: \u6cb9\u753b"])
