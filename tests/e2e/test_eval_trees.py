"""The trees of a run's evaluations, on a real pipeline: resumed, in two processes, and on the report."""

import json
from pathlib import Path

import pytest

from flowrl.commands.train import AFTER
from tests import ranks
from tests.e2e.conftest import finish, start, train

BRANCH = (
    "algorithm={name: branch_grpo, clip_range: 1e-3}",
    "rollout.sampler=null",
    "eval.every=1",
    "eval.best_guidance=[2.0]",
    "data.max_eval_prompts=2",
)


def trees(run: str) -> dict[str, dict]:
    """Tag -> what the files say."""
    files = sorted(Path(f"runs/{run}/eval").glob("tree-*.json"))
    return {file.stem.removeprefix("tree-"): json.loads(file.read_text()) for file in files}


def rows(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_has_the_same_trees_and_each_evaluation_one(place: Path):
    train("name=whole", "iterations=2", *BRANCH, after=AFTER)
    train("name=parts", "iterations=1", *BRANCH)
    train("name=parts", "iterations=2", *BRANCH, resume=True)
    whole, parts = trees("whole"), trees("parts")
    # No other guidance has a tree of its own, and the parts' first iteration was at first their last.
    assert [(tag, tree["iteration"]) for tag, tree in whole.items()] == [
        ("base", 0),
        ("iteration-000001", 1),
        ("tuned", 2),
    ]
    assert parts == {tag: whole[tag] for tag in ("base", "tuned")}
    assert whole["base"]["leaves"] != whole["tuned"]["leaves"]
    # Three steps, the first two split: 1 + 2 + 4 nodes before 4 leaves. The tree is no part of an iteration.
    assert {row["nfe/rollout"] for row in rows("whole")} == {7 / 4}
    assert Path("runs/whole/gallery/index.html").read_text().count('<svg class="tree"') == 3


@pytest.mark.slow
def test_two_processes_draw_the_same_tree_and_a_method_without_one_none(place: Path):
    train("name=one", "iterations=0", *BRANCH)
    code, output = finish(start("train", "run.yaml", "name=two", "iterations=0", *BRANCH, "--processes", "2"))
    assert code == 0, output
    assert trees("two") == trees("one")
    train("name=chains", "iterations=0", after=AFTER)
    assert not trees("chains")
    assert 'svg class="tree"' not in Path("runs/chains/gallery/index.html").read_text()


@pytest.mark.slow
def test_processes_that_share_the_network_draw_it_together(place: Path, monkeypatch: pytest.MonkeyPatch):
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    words = ["run.yaml", "name=shared", "iterations=1", *BRANCH, "model.shard=true", "eval.best_guidance=[]"]
    ranks.run([words])
    train("name=alone", "iterations=0", *BRANCH)
    found, expected = trees("shared")["base"], trees("alone")["base"]
    assert found["nodes"]["place"] == expected["nodes"]["place"]
    assert found["leaves"]["reward"] == pytest.approx(expected["leaves"]["reward"], abs=1e-4)
    assert list(trees("shared")) == ["base", "tuned"]
