"""Questions about a sample, as its record lists them, and what their answers are worth together.

A record's `questions` is a list; each is a text, or an object with `text`, `answer` (the right one, "yes" where it is
left out), `id` (its place, from 1, where it is left out) and `parents` (ids of questions without whose right answer
this one means nothing). The answer to a question is a number from 0 to 1, the judge's belief in the right answer;
NaN: it failed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

_KEYS = ("text", "answer", "id", "parents")
NO = 0.5
"""An answer of at most this is a no."""


@dataclass(frozen=True, slots=True)
class ListedQuestion:
    """A question of a sample's record."""

    text: str
    answer: str = "yes"
    """The right one."""
    parents: tuple[int, ...] = ()
    """Places of its parents in the list, from 0."""


def listed_questions(record: Mapping[str, Any]) -> tuple[ListedQuestion, ...]:
    """The questions of a record, in their order.

    Raises ValueError: none, one of another form, an id twice, or a parent that is no question of the record.

    >>> listed_questions({"questions": ["Is it a cat?", {"text": "Is it red?", "parents": [1]}]})[1]
    ListedQuestion(text='Is it red?', answer='yes', parents=(0,))
    """
    given = record.get("questions")
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"questions={given!r} must be a list with at least one question, a text or an object with 'text'"
        )
    listed = cast("list[Any]", given)
    entries = [_entry(each, place) for place, each in enumerate(listed)]
    ids = [entry.id for entry in entries]
    twice = next((each for each in ids if ids.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"questions: the id {twice!r} occurs twice; give every question an id of its own")
    for entry in entries:
        unknown = next((parent for parent in entry.parents if parent not in ids or parent == entry.id), None)
        if unknown is not None:
            raise ValueError(
                f"questions: {entry.text!r} has the parent {unknown!r}, which is no other question of this sample; "
                f"the ids are {', '.join(map(repr, ids))}"
            )
    return tuple(
        ListedQuestion(entry.text, entry.answer, tuple(ids.index(parent) for parent in entry.parents))
        for entry in entries
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    answer: str
    id: object
    parents: list[object]


def _entry(given: object, place: int) -> _Entry:
    if not isinstance(given, str | dict):
        raise ValueError(f"questions[{place}]={given!r} must be a text, or an object with 'text'")
    known = {"text": given} if isinstance(given, str) else cast("dict[str, Any]", given)
    strange = next((key for key in known if key not in _KEYS), None)
    if strange is not None:
        raise ValueError(f"questions[{place}] has the unknown key {strange!r}; the keys are {', '.join(_KEYS)}")
    text, answer, parents = known.get("text"), known.get("answer", "yes"), known.get("parents", [])
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"questions[{place}].text={text!r} must be a text")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"questions[{place}].answer={answer!r} must be a text")
    if not isinstance(parents, list):
        raise ValueError(f"questions[{place}].parents={parents!r} must be a list of ids")
    return _Entry(text, answer, known.get("id", place + 1), cast("list[object]", parents))


def after_parents(answers: Sequence[float], questions: Sequence[ListedQuestion]) -> list[float]:
    """The answers in the order of the list, 0 where a parent's is a no by then, so that zeros pass on.

    NaN stays, and an answer whose parent is NaN is NaN, unless another parent is a no.

    >>> chain = [ListedQuestion("a"), ListedQuestion("b", parents=(0,)), ListedQuestion("c", parents=(1,))]
    >>> after_parents([0.0, 1.0, 1.0], chain)
    [0.0, 0.0, 0.0]
    """
    result = list(answers)
    for place, question in enumerate(questions):
        above = [result[parent] for parent in question.parents]
        if any(value <= NO for value in above):
            result[place] = 0.0
        elif any(math.isnan(value) for value in above):
            result[place] = math.nan
    return result


def arithmetic_mean(answers: Sequence[float]) -> float:
    """NaN where one of them is, or none is there."""
    return math.fsum(answers) / len(answers) if answers else math.nan


def geometric_mean(answers: Sequence[float]) -> float:
    """The n-th root of the product: 0 where one of them is 0, NaN where one of them is NaN, or none is there.

    >>> round(geometric_mean([0.25, 1.0]), 6), geometric_mean([0.0, 1.0])
    (0.5, 0.0)
    """
    if not answers or any(math.isnan(value) for value in answers):
        return math.nan
    if min(answers) <= 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, answers)) / len(answers))
