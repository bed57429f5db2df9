"""Listed questions: their records, parents, and what answers are worth together."""

import math

import pytest

from flowrl.core.questions import (
    ListedQuestion,
    after_parents,
    arithmetic_mean,
    geometric_mean,
    listed_questions,
)
from tests.tables import table

NAN = math.nan


def question(*parents: int) -> ListedQuestion:
    return ListedQuestion("?", parents=parents)


CHAIN = [question(), question(0), question(1)]


@pytest.mark.parametrize(
    ("answers", "questions", "expected"),
    [
        ([0, 1, 1], CHAIN, [0, 0, 0]),
        ([1, 0, 1], CHAIN, [1, 0, 0]),
        ([1, 1, 0], CHAIN, [1, 1, 0]),
        ([1, 1, 1], [question(), question(), question(0, 1)], [1, 1, 1]),
        ([1, 0, 1], [question(), question(), question(0, 1)], [1, 0, 0]),
        # In the order of the list: a parent that comes later counts as it was answered.
        ([1, 0, 1], [question(1), question(2), question()], [0, 0, 1]),
        ([1, 1, 0], [question(1), question(2), question()], [1, 0, 0]),
        # A belief is kept above one half.
        ([0.6, 0.7, 0.8], CHAIN, [0.6, 0.7, 0.8]),
        ([0.5, 0.7, 0.8], CHAIN, [0.5, 0, 0]),
        ([NAN, 1, 1], CHAIN, [NAN, NAN, NAN]),
        ([NAN, 0, 1], [question(), question(), question(0, 1)], [NAN, 0, 0]),
        ([0, NAN, 1], CHAIN, [0, 0, 0]),
    ],
)
def test_a_parents_no_zeroes_child_and_grandchild_and_a_childs_leaves_the_parent(answers, questions, expected):
    assert after_parents(answers, questions) == pytest.approx(expected, nan_ok=True)


def test_means_know_nothing_where_a_question_failed():
    assert arithmetic_mean([0.2, 0.4]) == pytest.approx(0.3)
    assert geometric_mean([0.2, 0.8]) == pytest.approx(0.4)
    assert geometric_mean([0.0, 0.8]) == 0
    for mean in (arithmetic_mean, geometric_mean):
        assert math.isnan(mean([]))
        assert math.isnan(mean([0.0, NAN]))


def test_ids_are_places_unless_they_are_given():
    record = {"questions": [{"id": 7, "text": "a"}, "b", {"text": "c", "parents": [7, 2], "answer": "four"}]}
    assert listed_questions(record) == (
        ListedQuestion("a"),
        ListedQuestion("b"),
        ListedQuestion("c", "four", (0, 1)),
    )


@pytest.mark.parametrize(
    ("given", "words"),
    table(__file__, "refused_questions"),
)
def test_a_wrong_record_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        listed_questions({} if given is None else {"questions": given})
