"""Pairs in both orders: a judge that follows the place decides nothing, an honest one is symmetric, lines are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.apps.suites.running import pairs
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.pairs import Preferences, judge_pairs
from flowrl.apps.suites.running.runner import PATIENCE, Task
from flowrl.commands import eval as evaluation
from flowrl.core import assets
from flowrl.core.errors import ConfigError, RewardError, RewardFailure
from flowrl.evaluation import suite as base
from flowrl.scoring.entries import reward_plan

SUITE = base.load_suite("geneval")
ITEMS = SUITE.items(None)[:6]
SAMPLES = 2
HONEST = """
import torch
def score(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3))
def compare(first, second, prompts, metadata):
    change = torch.tensor([float(a.mean() - b.mean()) for a, b in zip(first, second)])
    return (20 * change).sigmoid()
"""
FIRST = HONEST.replace("return (20 * change).sigmoid()", "return torch.full((len(prompts),), 0.9)")


def brighter(first: Any, second: Any, prompts: Any, metadata: Any) -> Tensor:
    return torch.stack([(a.mean() - b.mean()) for a, b in zip(first, second, strict=True)]).sigmoid()


def both(compare: Any, a: Tensor, b: Tensor) -> Preferences:
    return judge_pairs(compare, a, b, ["p"] * len(a), [{}] * len(a))


@pytest.mark.parametrize("certainty", [0.51, 0.9, 1.0])
def test_a_judge_that_says_first_decides_nothing_and_is_all_bias(certainty):
    images = torch.rand(5, 3, 4, 4)
    for answer in (certainty, 1 - certainty):  # "first", and "second"
        found = both(lambda a, b, p, m, answer=answer: torch.full((len(p),), answer), images, images.flip(0))
        assert found.tuned.tolist() == [0.5] * 5
        assert found.biased.tolist() == [1.0] * 5


def test_an_honest_judge_is_symmetric_and_without_bias():
    a, b = torch.rand(20, 3, 4, 4), torch.rand(20, 3, 4, 4)
    one, other = both(brighter, a, b), both(brighter, b, a)
    assert torch.equal(one.tuned + other.tuned, torch.ones(20).double())
    assert one.tuned.tolist() == [float(y.mean() > x.mean()) for x, y in zip(a, b, strict=True)]
    assert one.biased.sum() == 0
    assert both(brighter, a, a).tuned.tolist() == [0.5] * 20


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_whatever_is_answered_the_models_exchanged_have_the_rest(answers):
    base_first, tuned_first = torch.tensor(answers, dtype=torch.float64).unbind(1)
    one, other = Preferences(base_first, tuned_first), Preferences(tuned_first, base_first)
    assert torch.equal(one.tuned + other.tuned, torch.ones(len(answers)).double())
    assert torch.equal(one.biased, other.biased)
    assert set(one.tuned.tolist()) <= {0.0, 0.5, 1.0}
    # Where the place decided, the image did not.
    assert bool((one.tuned[one.biased == 1] == 0.5).all())


def test_a_pair_with_one_answer_is_not_judged():
    nan, known = torch.tensor([math.nan, 0.9, math.nan]), torch.tensor([0.1, math.nan, math.nan])
    found = Preferences(nan.double(), known.double())
    assert bool(found.tuned.isnan().all())
    assert bool(found.biased.isnan().all())


@pytest.mark.parametrize("values", [torch.tensor([1.5]), torch.tensor([0.5, 0.5])])
def test_a_judge_that_breaks_its_contract_is_named(values):
    with pytest.raises(RewardError, match="a judge of pairs answered"):
        both(lambda *_: values, torch.rand(1, 3, 4, 4), torch.rand(1, 3, 4, 4))


# ---- folders


def filled(path: Path) -> dict[str, ResultsFolder]:
    """Images of two models; those of the tuned one are brighter but for the first prompt."""
    folders = {name: ResultsFolder(path / name) for name in ("base", "model")}
    for name, folder in folders.items():
        folder.begin({"model": name}, {}, {})
        for number, item in enumerate(ITEMS):
            for k in range(SAMPLES):
                light = 0.5 if name == "base" else 0.3 if number == 0 else 0.7
                folder.keep(torch.full((3, 4, 4), light + 0.01 * k), item, k, {})
    return folders


def task(items: Any = None) -> Task:
    return Task(suite=SUITE, items=ITEMS if items is None else items, samples=SAMPLES, batch_size=1)


class Flaky:
    """An honest judge that is away from its n-th pair on."""

    def __init__(self, away: int) -> None:
        self.asked, self.away, self.reason = 0, away, "no server"
        self.facts = {"name": "flaky"}

    def __call__(self, base: Any, tuned: Any, items: Any) -> Preferences:
        self.asked += len(items)
        if self.asked > self.away:
            nothing = torch.full((len(items),), math.nan).double()
            return Preferences(nothing, nothing)
        return judge_pairs(brighter, base, tuned, [item.text for item in items], [{}] * len(items))


def test_equal_images_tie_whatever_a_judge_answers(tmp_path):
    """It says in both orders that the tuned image is better, of other images and of the same."""

    class Partial(Flaky):
        def __call__(self, base: Any, tuned: Any, items: Any) -> Preferences:
            return Preferences(torch.full((len(items),), 0.1).double(), torch.full((len(items),), 0.9).double())

    judge: Any = Partial(0)
    folders = filled(tmp_path)
    for k in range(SAMPLES):
        folders["model"].image(ITEMS[1], k).write_bytes(folders["base"].image(ITEMS[1], k).read_bytes())
    rows = pairs.compare_folders(task(ITEMS[:2]), folders, judge, tmp_path)
    assert [row.preference for row in rows] == [1.0, 1.0, 0.5, 0.5]


def test_a_judge_that_goes_away_keeps_its_lines_and_the_same_call_goes_on(tmp_path):
    folders, judge = filled(tmp_path), Flaky(away=3)
    with pytest.raises(RewardFailure, match=rf"failed on {PATIENCE} pairs in a row \(no server\).*same command again"):
        pairs.compare_folders(task(), folders, judge, tmp_path)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / pairs.FILE).read_text().splitlines()]
    assert [line["preference"] for line in lines] == [0.0, 0.0, 1.0] + [None] * PATIENCE  # NaN, never 0
    assert lines[-1]["error"] == "no server"
    # A line that a kill tore off does not spoil the next one.
    with (tmp_path / pairs.FILE).open("a") as stream:
        stream.write('{"id": "0000')
    judge.asked, judge.away = 0, 100
    rows = pairs.compare_folders(task(), folders, judge, tmp_path)  # type: ignore[arg-type]
    assert judge.asked == 12 - 3
    assert [row.preference for row in rows] == [0.0, 0.0] + [1.0] * 10
    judge.asked = 0
    assert pairs.compare_folders(task(), folders, judge, tmp_path) == rows  # type: ignore[arg-type]
    assert judge.asked == 0


def test_lines_of_another_judge_need_the_word(tmp_path):
    folders, judge = filled(tmp_path), Flaky(away=100)
    pairs.compare_folders(task(), folders, judge, tmp_path)  # type: ignore[arg-type]
    judge.facts = {"name": "other"}
    with pytest.raises(ConfigError, match=r"judged by another judge.*--rejudge"):
        pairs.compare_folders(task(), folders, judge, tmp_path)  # type: ignore[arg-type]
    judge.asked = 0
    pairs.compare_folders(task(), folders, judge, tmp_path, rejudge=True)  # type: ignore[arg-type]
    assert judge.asked == 12
    assert (tmp_path / "pairs-judged-1.jsonl").is_file()


def row(prompt: str, k: int, preference: float | None, biased: float | None = 0.0) -> Any:
    return SimpleNamespace(id=prompt, k=k, prompt=prompt, preference=preference, biased=biased)


def test_the_win_rate_is_the_mean_of_the_prompts_and_missing_pairs_are_counted_apart():
    rows = [row("a", 0, 1.0), row("a", 1, 1.0), row("b", 0, 0.0), row("b", 1, None, None), row("c", 0, 0.5, 1.0)]
    found = pairs.summary(rows)
    assert found["rate"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert (found["wins"], found["losses"], found["ties"], found["judged"], found["pairs"]) == (2, 1, 1, 4, 5)
    assert found["position_bias"] == 0.25
    assert 0 <= found["low"] <= found["rate"] <= found["high"] <= 1
    nothing = pairs.summary([row("a", 0, None, None)])
    assert math.isnan(nothing["rate"])
    assert math.isnan(nothing["position_bias"])


# ---- the command and a judge of the project


def run(tmp_path: Path, judge: str, **options: Any) -> dict[str, Any]:
    out, same = tmp_path / "out", str(assets.asset_folder("tiny-sd3", "model_index.json"))
    given: dict[str, Any] = {"suite": "geneval", "steps": 1, "limit": 2, "samples": 1, "base": same, "judge": [judge]}
    evaluation.command("tiny-sd3", out=out, pair_judge=judge, **(given | options))
    return json.loads((out / "result.json").read_text())


def test_the_command_adds_a_win_rate_with_its_bias(tmp_path, capsys):
    file = tmp_path / "first.py"
    file.write_text(FIRST)
    result = run(tmp_path, str(file))
    assert (result["pairs"]["rate"], result["pairs"]["position_bias"]) == (0.5, 1.0)
    assert "## Pairs" in (tmp_path / "out" / "table.md").read_text()
    assert "Position bias: 1.0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"base": None}, "pairs have images of two models, and no --base names the other"),
        ({"pair_judge": None, "pair_set": ["x=1"]}, "--pair-set x=1: it is an option of a --pair-judge"),
    ],
)
def test_a_judge_of_pairs_needs_two_models(tmp_path, options, reason):
    given: dict[str, Any] = {"suite": "geneval", "base": "tiny-sd", "pair_judge": "vlm_judge"}
    with pytest.raises(ConfigError, match=reason):
        evaluation.command("tiny-sd3", out=tmp_path / "out", **(given | options))


def test_one_prompt_has_no_interval_and_the_page_says_so():
    row = pairs.PairRow("a", 0, "a cat", 0.2, 0.9, 1.0, 0.0, "mark")
    page = pairs.text(pairs.summary([row]), "vlm_judge")
    assert "Win rate of the tuned model: 1.0000 (95 % interval: none, 1 prompts)" in page


def test_a_reward_of_single_images_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="judges one image at a time; take vlm_judge"):
        pairs.PairJudge(reward_plan({"name": "jpeg"}, "--pair-judge jpeg"))


def test_the_rubric_of_preferences_sees_each_pair_in_both_orders():
    pytest.importorskip("openai")
    from tests.fake_chat import FakeChat, Reply, Request

    def honest(request: Request) -> dict[str, float]:
        first, second = (float(image.mean()) for image in request.images)
        return {"A": -0.1, "B": -2.0} if first > second else {"A": -2.0, "B": -0.1}

    server = FakeChat()
    try:
        server.reset(lambda request: Reply(top=honest(request)))
        tree = {"name": "vlm_judge", "rubric": "preference", "backend": "http"}
        plan = reward_plan(tree | {"http": {"base_url": server.url, "model": "fake"}}, "--pair-judge vlm_judge")
        judge = pairs.PairJudge(plan)
        dark, bright = torch.full((2, 3, 8, 8), 0.2), torch.full((2, 3, 8, 8), 0.8)
        items = ITEMS[:2]
        found = judge(list(dark), list(bright), items)
        assert found.tuned.tolist() == [1.0, 1.0]
        assert found.biased.tolist() == [0.0, 0.0]
        assert len(server.requests) == 4
        assert judge(list(bright), list(dark), items).tuned.tolist() == [0.0, 0.0]
        server.reset(lambda request: Reply(top={"A": -0.1, "B": -2.0}))
        found = judge(list(dark), list(bright), items)
        assert (found.tuned.tolist(), found.biased.tolist()) == ([0.5, 0.5], [1.0, 1.0])
    finally:
        server.stop()
