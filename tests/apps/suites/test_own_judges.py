"""The judges that suites by questions have by default, with a scripted model in place of the weights."""

import json
import re

import pytest
import torch
from flowrl.rewards._judges import backends

from flowrl.apps.suites.running.judging import RewardJudge
from flowrl.core.errors import RewardFailure
from flowrl.evaluation import suite as base
from flowrl.reward import RewardError, unscored
from flowrl.scoring.entries import reward_plan
from tests import tiny_suites
from tests.tiny_rewards.judges import Scripted


class Sure(Scripted):
    """Yes with 3/4, the first number with 1/2; points of 1, 0, 1, ...; every rating 1."""

    def option_logprobs(self, questions, options):
        self.asked += questions
        first = [0.75, 0.25] if len(options) == 2 else [0.5, *[0.01] * (len(options) - 1)]
        return torch.tensor([first] * len(questions), dtype=torch.float64).log()

    def write(self, questions, writing):
        self.asked += questions
        return [self._words(question.text) for question in questions]

    def _words(self, text: str) -> str:
        keys = re.search(r"exactly these keys: (.*)\.", text)
        if keys is not None:
            return json.dumps(dict.fromkeys(keys[1].split(", "), 1))
        count = int(text.split("with exactly ")[1].split()[0])
        return json.dumps({"points": [{"reason": "so", "score": (place + 1) % 2} for place in range(count)]})


EXPECTED = {
    "dpg": ({"dpg": 1.0}, [1.0] * 4, "Is there a dog? Answer with Yes or No."),
    "geneval2": (
        {"soft_tifa_am": (0.01 + 0.75 + 0.75) / 3, "soft_tifa_gm": (0.01 * 0.75**2) ** (1 / 3)},
        [0.01, 0.75, 0.75],
        "Answer in one word.",
    ),
    "unigenbench": ({"unigenbench": 2 / 3}, [1.0, 0.0, 1.0], "1. Style (style of art, photography or design)"),
    "t2i_compbench": ({"vlm_yes_product": 0.75**2}, [0.75, 0.75], "a green bench? Answer with Yes or No."),
    "wise": (
        {"vlm_judge": 1.0, **{f"vlm_judge_{name}": 1.0 for name in ("consistency", "realism", "aesthetic_quality")}},
        [],
        'What the prompt means: "it is 1"',
    ),
}


def judged(name, folder, monkeypatch, judge):
    monkeypatch.setattr(backends.Backend, "load", lambda self, reward, default: judge)
    suite = base.load_suite(name)
    items = suite.items(tiny_suites.prompts(name, suite, folder))[:1]
    plans = [reward_plan(dict(entry), "--judge") for entry in suite.entries(items) or ()]
    return RewardJudge(plans, suite, items), items


@pytest.mark.parametrize("name", EXPECTED)
def test_the_default_judge_asks_in_the_suites_words_and_its_answers_are_kept(name, monkeypatch, tmp_path):
    scores, answers, words = EXPECTED[name]
    model = Sure()
    judge, items = judged(name, tmp_path, monkeypatch, model)
    (judgement,) = judge([torch.full((3, 8, 8), 0.5)], items)
    assert judgement.scores == pytest.approx(scores)
    assert judgement.answers == pytest.approx(answers)
    assert any(words in question.text for question in model.asked)


def test_a_question_that_fails_leaves_the_other_answers_and_no_score(monkeypatch, tmp_path):
    class Half(Sure):
        def option_logprobs(self, questions, options):
            values = super().option_logprobs(questions, options)
            values[1] = torch.nan
            unscored("one question failed")
            return values

    judge, items = judged("dpg", tmp_path, monkeypatch, Half())
    (judgement,) = judge([torch.full((3, 8, 8), 0.5)], items)
    assert judgement.scores == {"dpg": None}
    assert judgement.answers == [1.0, None, 1.0, 1.0]
    assert judgement.error == "one question failed"


def test_a_judge_that_refuses_every_question_ends_the_run(monkeypatch, tmp_path):
    class Refusing(Sure):
        def option_logprobs(self, questions, options):
            raise RewardError("reward 'questions': the server answers 401")

    judge, items = judged("dpg", tmp_path, monkeypatch, Refusing())
    with pytest.raises(RewardFailure, match="401"):
        judge([torch.full((3, 8, 8), 0.5)], items)


def test_one_of_several_judges_that_is_away_ends_the_run_and_one_that_comes_back_does_not(monkeypatch, tmp_path):
    suite = base.load_suite("drawbench")
    items = suite.items(tiny_suites.prompts("drawbench", suite, tmp_path))[:1] * 4
    judge = RewardJudge([reward_plan({"name": name}, "--judge") for name in ("jpeg", "degeneracy")], suite, items)
    raw, away = judge.scorer.raw, [True, False, True, True]

    def some(entry, batch, errors):
        found = raw(entry, batch, errors)
        if entry.name == "jpeg" or not away.pop(0):
            return found
        errors.append("no answer")
        return {name: torch.full_like(value, torch.nan) for name, value in found.items()}

    monkeypatch.setattr(judge.scorer, "raw", some)
    images = [torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    for lost in (True, False, True):
        for judgement in judge(images, items):
            assert judgement.scores["jpeg_kb"] is not None
            assert (None in judgement.scores.values(), judgement.error) == (lost, "no answer" if lost else "")
    with pytest.raises(RewardFailure, match=r"reward 'degeneracy' is away: it failed on 8 images in a row \(no answer"):
        judge(images, items)
