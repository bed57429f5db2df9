"""questions: lists of questions to a judge, each by itself and all at once."""

import json
import math

import pytest
import torch
from flowrl.rewards._judges import backends
from flowrl.rewards._judges.base import Question
from flowrl.rewards.questions import Config

from flowrl.reward import Reward, RewardError
from flowrl.rewards import questions
from tests.tiny_rewards.judges import Scripted, grey


class Sure(Scripted):
    """A judge that is as sure of each option as `beliefs(question)` says, by name."""

    def __init__(self, beliefs):
        super().__init__()
        self.beliefs = beliefs

    def option_logprobs(self, questions, options):
        self.asked += questions
        rows = [[self.beliefs(q).get(name, 1e-9) for name in options] for q in questions]
        return torch.tensor(rows, dtype=torch.float64).log()


def built(monkeypatch, judge, **options) -> Reward:
    monkeypatch.setattr(backends.Backend, "load", lambda self, reward, default: judge)
    return questions.build(Config(**options))


def each(reward: Reward, images, prompts, records) -> list[list[float]]:
    assert reward.answers is not None
    return reward.answers(images, prompts, records)


def outputs(reward: Reward, images, prompts, records) -> dict[str, torch.Tensor]:
    result = reward.score(images, prompts, records)
    assert isinstance(result, dict)
    return result


def answered(reward: Reward, listed, prompt="a cat") -> list[list[float]]:
    return each(reward, grey(51), [prompt], [{"questions": listed}])


BELIEFS = {
    "Is it a cat?": {"yes": 0.6, "no": 0.2},
    "Is it red?": {"yes": 0.1, "no": 0.4},
    "How many are there?": {"two": 0.3, "three": 0.1},
}
LISTED = ["Is it a cat?", {"text": "Is it red?", "answer": "No"}, {"text": "How many are there?", "answer": "2"}]


@pytest.mark.parametrize(
    ("worth", "expected"),
    [("share", [0.75, 0.8, 0.75]), ("probability", [0.6, 0.4, 0.3]), ("decision", [1, 1, 1])],
)
def test_the_right_answer_counts_as_worth_says(monkeypatch, worth, expected):
    judge = Sure(lambda q: BELIEFS[q.text])
    reward = built(monkeypatch, judge, worth=worth, question="{question}")
    assert answered(reward, LISTED)[0] == pytest.approx(expected, abs=1e-6)
    values = outputs(reward, grey(51), ["a cat"], [{"questions": LISTED}])
    assert float(values["questions"]) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert float(values["questions_product"]) == pytest.approx(math.prod(expected), abs=1e-6)
    assert float(values["questions_geometric"]) == pytest.approx(math.prod(expected) ** (1 / 3), abs=1e-6)


def test_a_parents_no_zeroes_the_mean_alone_and_answers_stay_as_they_were_given(monkeypatch):
    judge = Sure(lambda q: {"yes": 0.1 if "cat" in q.text else 0.9, "no": 0.9 if "cat" in q.text else 0.1})
    reward = built(monkeypatch, judge, worth="decision")
    listed = ["a cat?", {"text": "is it red?", "parents": [1]}, "is it day?"]
    assert answered(reward, listed) == [[0, 1, 1]]
    assert float(outputs(reward, grey(51), ["a cat"], [{"questions": listed}])["questions"]) == pytest.approx(1 / 3)


def test_the_question_holds_the_prompt_and_the_texts_stay_as_they_are(monkeypatch):
    judge = Sure(lambda q: {"yes": 0.5, "no": 0.5})
    reward = built(monkeypatch, judge, question='"{prompt}": {question} Yes or No?')
    answered(reward, ["Is {prompt} there?"], prompt="{question}")
    assert judge.asked[0].text == '"{question}": Is {prompt} there? Yes or No?'


def test_a_failed_question_masks_its_sample_and_keeps_the_other_answers(monkeypatch):
    judge = Sure(lambda q: {"yes": math.nan, "no": math.nan} if "red" in q.text else {"yes": 1.0, "no": 0.0})
    reward = built(monkeypatch, judge)
    given = each(reward, grey(51, 52), ["a", "b"], [{"questions": ["red?", "day?"]}, {"questions": ["day?"]}])
    assert math.isnan(given[0][0])
    assert given[0][1] == 1
    assert given[1] == [1]
    values = outputs(reward, grey(51, 52), ["a", "b"], [{"questions": ["red?", "day?"]}, {"questions": ["day?"]}])
    for name in ("questions", "questions_geometric", "questions_product"):
        assert values[name].isnan().tolist() == [True, False], name


def points(*scores: int) -> str:
    return json.dumps({"points": [{"reason": "so", "score": score} for score in scores]})


def test_together_every_point_has_a_reason_and_lists_of_other_lengths_are_refused(monkeypatch):
    def words(question: Question) -> str:
        if question.exchange is not None:
            return points(0, 1)
        count = question.text.count("\n1. ") + question.text.count("\n2. ")
        return points(1, 0) if count == 2 and "blue" not in question.text else points(1)

    judge = Scripted(words=words)
    reward = built(monkeypatch, judge, ask="together")
    records = [{"questions": ["red", "round"]}, {"questions": ["day"]}, {"questions": ["blue", "round"]}]
    assert each(reward, grey(51, 52, 53), ["a", "b", "c"], records) == [[1, 0], [1], [0, 1]]
    assert judge.counters.values()["reasks"] == 1
    assert 'this description:\n"a"\n' in judge.asked[0].text
    assert "1. red\n2. round\n" in judge.asked[0].text


@pytest.mark.parametrize("text", ["no words", points(1), points(1, 2), '{"points": [{"score": 1}, {"score": 1}]}'])
def test_together_an_answer_that_cannot_be_used_twice_is_nan(monkeypatch, text):
    reward = built(monkeypatch, Scripted(words=lambda q: text), ask="together")
    assert all(math.isnan(value) for value in answered(reward, ["red", "round"])[0])


@pytest.mark.parametrize(
    ("options", "listed", "words"),
    [
        ({}, [{"text": "Which colour?", "answer": "red"}], "'Which colour' has|has the right answer 'red'; it can be"),
        ({"ask": "together"}, [{"text": "red", "answer": "no"}], "ask: together takes"),
        ({}, None, "a sample's record: questions=None"),
        ({}, ["a", {"text": "b", "parents": [9]}], "'b' has the parent 9"),
    ],
)
def test_what_no_judge_can_answer_is_refused_before_it_is_asked(monkeypatch, options, listed, words):
    judge = Sure(lambda q: {"yes": 1.0, "no": 0.0})
    reward = built(monkeypatch, judge, **options)
    with pytest.raises(RewardError, match=words):
        reward.score(grey(51, 52), ["a", "b"], [{"questions": ["a"]}, {} if listed is None else {"questions": listed}])
    assert not judge.asked
