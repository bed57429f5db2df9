"""configs/judge and `python -m scripts.lab judge`: the best evaluation, the costs of a method, the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flowrl import shapes
from flowrl.evaluation.results import Evaluation
from scripts.lab import judge
from scripts.lab.recipes import ROOT
from tests import toys


def evaluation(tag: str, iteration: int, strict: list[float]) -> Evaluation:
    table = np.asarray(strict)[:, None]
    scores = {"judge": 2 * table, "shapes_strict": table}
    return toys.evaluation(tag, iteration, 1.0, 6, tuple("abcdefgh"[: len(strict)]), 1, scores)


def cell(judged: list[float], step: int = 1000) -> dict[str, Any]:
    interval = {"mean": 0.1, "low": 0.05, "high": 0.15, "n": 512}
    rows = [
        {"iteration": 8 * i, "evaluations": step * i, "cpu_seconds": 3.0 * i, "judge": value, "shapes_strict": 0.4}
        for i, value in enumerate(judged)
    ]
    best = {"gain": interval, "iterations": [8, 16]}
    return {"commit": "0123456789", "curve": rows, "best": best, "summary": {"difference": {"shapes_strict": interval}}}


def test_the_luck_of_the_choice_is_not_in_the_best_evaluation():
    """Each evaluation is better on one half alone: whoever chose on what is measured would see a gain of 1."""
    way = [
        evaluation("base", 0, [0, 0, 0, 0]),
        evaluation("iteration-000008", 8, [1, 0, 1, 0]),
        evaluation("tuned", 16, [0, 1, 0, 1]),
    ]
    assert judge.best(way)["gain"]["mean"] == 0.0
    better = [way[0], evaluation("iteration-000008", 8, [1, 0, 0, 1]), evaluation("tuned", 16, [1, 1, 1, 1])]
    assert judge.best(better) == {"gain": judge.interval(np.ones(4), way[0].groups), "iterations": [16, 16]}


def test_costs_count_a_backward_as_two_and_the_judge(tmp_path: Path):
    way = [evaluation("base", 0, [0.0, 1.0]), evaluation("tuned", 2, [1.0, 1.0])]
    rows = [{"nfe/rollout": 6.0, "nfe/train": 2.0, "perf/cpu_s": 1.5}] * 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    climbing = judge.curve(tmp_path, way, judge.RECIPES / "draft.yaml")
    assert climbing[1] == {
        "iteration": 2,
        "evaluations": 2 * 32 * (6 + 3 * 2 + 1 + 3),
        "cpu_seconds": 3.0,
        "judge": 2.0,
        "shapes_strict": 1.0,
    }
    assert climbing[0]["evaluations"] == 0
    policy = judge.curve(tmp_path, way, judge.RECIPES / "flow_grpo.yaml")
    assert policy[1]["evaluations"] == 2 * 128 * (6 + 3 * 2 + 1)
    rival = judge.curve(tmp_path, way, judge.RECIPES / "dance_grpo.yaml")
    assert rival[1]["evaluations"] == policy[1]["evaluations"]
    # The pull: once at the start of a group, and once at the next step of each of its samples.
    pulled = judge.curve(tmp_path, way, judge.RECIPES / "euphonium.yaml")
    assert pulled[1]["evaluations"] == rival[1]["evaluations"] + 2 * (8 + 128) * 3


def test_the_share_is_of_the_rivals_evaluations_to_its_own_last_value():
    rival = cell([0.0, 1.0, 2.0], step=10_000)
    assert judge.share_to_reach(cell([0.0, 1.5, 2.0, 3.0]), rival) == "10.0 %"
    assert judge.share_to_reach(cell([0.0, 1.5]), rival) == "not reached"
    assert judge.share_to_reach(cell([0.0]), None) == "-"


def test_the_page_and_the_picture_are_made_of_the_cells(tmp_path: Path):
    cells = {"flow_grpo/0": cell([0.0, 1.0], 10_000), "draft/0": cell([0.0, 2.0])}
    text = judge.page(cells)
    assert "| draft | 0 | 0.00 -> 2.00 | 40.0 | +10.0 [+5.0, +15.0] (8 and 16) |" in text
    assert "| 1,000 | 10.0 % | 3 |" in text
    judge.draw(cells, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", judge.recipes())
def test_a_recipe_has_the_data_model_reward_and_evaluations_of_the_others(name):
    """But for the student, which knows four steps, the near captions of SRPO, and the given images of PRFL."""
    trees = [yaml.safe_load(judge.recipes()[each].read_text(encoding="ascii")) for each in (judge.POLICY, name)]
    if name == "rocm":
        trees[0]["model"]["path"], trees[0]["eval"]["num_inference_steps"] = "tiny-sd3-student", 4
    if name == "srpo":
        near = (ROOT / "assets/prompts/shapes-train-near.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["prompt"] for line in near] == list(shapes.prompts("train"))
        trees[0]["data"]["prompts"] = "shapes-train-near.jsonl"
    assert (trees[1]["data"].pop("anchor", None) is not None) == (name == "prfl")
    for key in ("model", "data", "rewards"):
        assert trees[0][key] == trees[1][key]
    assert trees[0]["eval"] == trees[1]["eval"] | {"every": trees[0]["eval"]["every"]}
    assert trees[1]["iterations"] // trees[1]["eval"]["every"] >= 5
