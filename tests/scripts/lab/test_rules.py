"""`python -m scripts.lab rules`: the studies' rows, turned labels, the best of n, the tables of the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from flowrl.config.load import load_config
from flowrl.media import media
from scripts.lab import rules
from scripts.lab.recipes import recipes
from tests.toys import evaluation

ROWS = {f"{study}/{own.name}": own for study, members in rules.rows().items() for own in members}


def cell(base: str, tuned: str, images: int = 4) -> dict[str, Any]:
    summary = {"cpu_seconds": 12.4, "seconds": 9.0}
    right = {"base": base, "tuned": tuned}
    metrics = {name: [0.25, 0.5] for name in rules.KEPT}
    told = {"commit": "0123456789", "summary": summary, "images": images, "right": right, "metrics": metrics}
    return told | {"start": 0.4}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_configuration_and_another_than_the_one_it_is_compared_with(name):
    own = ROWS[name]
    load_config(recipes()[own.recipe], list(own.words))
    other = ROWS[f"{own.study}/{own.less}"]
    assert own.stored or own is other or own.words != other.words
    assert set(own.shows) <= rules.COLUMNS.keys()


def test_a_share_of_the_labels_is_turned_round_and_a_larger_share_contains_it(tmp_path):
    source, turned = tmp_path / "pairs", {}
    (source / "images").mkdir(parents=True)
    (source / "images" / "a.png").write_bytes(b"image")
    pair = {"chosen_scores": {"total": 1.0}, "rejected_scores": {"total": 0.5}, "margin": 0.5}
    lines = [json.dumps({"chosen": f"{n}w", "rejected": f"{n}l"} | pair) + "\n" for n in range(50)]
    (source / "pairs.jsonl").write_text("".join(lines))
    for share in (0.0, 0.1, 0.3):
        rules.flip_labels(source, tmp_path / f"{share}", share)
        records = [json.loads(line) for line in (tmp_path / f"{share}" / "pairs.jsonl").read_text().splitlines()]
        assert all((each["chosen"][-1] == "w") == (each["chosen_scores"]["total"] == 1.0) for each in records)
        assert [each["chosen"][:-1] for each in records] == [str(n) for n in range(50)]
        turned[share] = {n for n, each in enumerate(records) if each["chosen"][-1] == "l"}
    assert (tmp_path / "0.3" / "images" / "a.png").read_bytes() == b"image"
    assert [len(turned[share]) for share in (0.0, 0.1, 0.3)] == [0, 5, 15]
    assert turned[0.1] < turned[0.3]


def test_the_best_of_n_is_the_mean_over_all_draws():
    own = cell("0124", "4400")
    assert_allclose(rules.best_of(own, "base"), [0, 0.25, 0.5, 1])
    assert_allclose(rules.best_of(own, "base", 2), [0, 3 / 6, 5 / 6, 1])
    assert rules.best_of(own, "base", 4).tolist() == [0, 1, 1, 1]
    assert rules.rival(own, own).startswith("75.0 of 4; -25.0 [")


def test_the_winners_error_is_compared_with_its_start():
    own = cell("0124", "4400")
    assert rules.winner(own, own) == "0.400 to 0.500, x 1.25"


def test_fifths_leave_out_iterations_without_a_metric():
    name = rules.KEPT[0]
    assert rules.fifths([{name: k} if k else {} for k in range(10)]) == {name: [1.0, 8.5]}


def test_tables_stand_between_their_marks_and_rows_that_were_not_run_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "PAGE", Path(tmp_path / "rules.md"))
    text = "head\n<!-- rules_flipped -->\nold\n<!-- end of rules_flipped -->\ntail\n"
    rules.PAGE.write_text(text)
    cells = {"flipped/clean/0": cell("1111", "3333"), "flipped/sigmoid-30-no-kl/0": cell("1111", "2222")}
    for _ in range(2):
        rules.write_page(cells)
        page = rules.PAGE.read_text()
    assert page.startswith("head\n<!-- rules_flipped -->\n| row | seed |")
    assert page.endswith("```\n<!-- end of rules_flipped -->\ntail\n")
    assert "| sigmoid-30-no-kl | 0 | 25.0 | +25.0" in page
    assert "| clean: -25.0" in page
    assert "| 50 % | 12 | `01234567` |" in page
    assert "sigmoid-30-no-kl: flowrl train configs/lab/diffusion_dpo.yaml data.pairs.path=" in page
    assert "robust" not in page
    assert "old" not in page


def test_a_stored_run_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rules.runs, "RUNS", tmp_path)
    with pytest.raises(rules.runs.Failed, match="quickstart-seed0 is no finished run"):
        rules.run_cell(ROWS["rival/quickstart"], 0)


def test_measures_along_a_run_are_those_of_each_evaluation_beside_the_base_with_another_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "SETS", 16)
    monkeypatch.setattr(rules, "FEATURES", "grids")
    random = torch.Generator().manual_seed(0)
    for tag, iteration, scale in (("base", 0, 1.0), ("iteration-000002", 2, 1.0), ("tuned", 4, 0.2)):
        right = np.zeros((20, 2)) + (tag == "tuned")
        texts = [f"caption {number}" for number in range(20)]
        scores, spread = {rules.METRIC: right}, np.asarray([2.0, np.nan])
        own = evaluation(tag, iteration, 1.0, 6, texts, 2, scores, diversity=spread)
        own.save(tmp_path / "eval")
        for number in range(40):
            image = torch.rand(3, 8, 8, generator=random) * scale
            media.write(image, tmp_path / "eval" / tag / f"{number // 2:05d}-{number % 2}")
    base, middle, end = rules.along(tmp_path)
    assert [each["iteration"] for each in (base, middle, end)] == [0, 2, 4]
    assert (end["strict"], end["precision"], end["diversity"]) == (1.0, 0.0, 2.0)
    assert end["kid"] > 20 * max(abs(base["kid"]), abs(middle["kid"]))
    cells = {"sets/fpo/0": cell("1111", "3333") | {"way": [base, end]}}
    lines = rules.way_tables(rules.rows()["sets"], cells)
    assert lines[1] == "| fpo, at iteration | strict | diversity | kid | precision | recall | vendi |"
    assert lines[-1].startswith("| 4 | 100.0 | 2.000 | ")
    summary = {
        "by": "clip_cos",
        "judges": {rules.METRIC: {"base": [{"mean": 0.5}] * 4, "rival": [rules.interval(np.ones(9))] * 4}},
    }
    assert rules.chosen({"summary": {"best_of": summary}}, {}).startswith("50.0 by clip_cos; +100.0")
