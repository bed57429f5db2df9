"""Questions: a vision-language model answers the questions that each sample's record lists, and they are put together.

A record's `questions` is a list of texts, or of objects with `text`, `answer` (the right one; "yes"), `id` (from 1) and
`parents` (ids of questions without whose right answer this one means nothing). The worth of an answer by `worth`:

- share: P(right answer) among the options, yes and no, or the numbers one to nine;
- probability: P(right answer) over the whole vocabulary, as Soft-TIFA and VQAScore take it;
- decision: 1 where the share is above 1/2, else 0.

With `ask: together` a sample's questions are put at once, and the judge writes a reason and 0 or 1 for each.

Raw: `questions` is the mean after every answer below a no became 0 (parents first, so zeros pass on);
`questions_geometric` the geometric mean and `questions_product` the product of the answers as they were given. A sample
with a question that failed is NaN; `Reward.answers` gives the answers that there are.

Source: DPG-Bench (arXiv:2403.05135), Soft-TIFA (arXiv:2512.16853), T2I-CompBench (arXiv:2307.06350), UniGenBench
(arXiv:2510.18701).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from flowrl.rewards._judges.backends import QWEN, Backend, judge_card, judge_reward
from flowrl.rewards._judges.base import YES_NO, Judge, Question, Writing, ask_json, option_probabilities, strict_fields
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor

from flowrl.core.questions import (
    NO,
    ListedQuestion,
    after_parents,
    arithmetic_mean,
    geometric_mean,
    listed_questions,
)
from flowrl.reward import AnswerFunction, Images, Reward, RewardError, ScoreFunction

LEVEL = "experimental"
CARD = judge_card(
    *("questions", "questions_geometric", "questions_product"),
    requires=("questions",),
    level=LEVEL,
    licence="Apache-2.0 (Qwen3-VL; unverified); another judge's own",
    source="arXiv:2403.05135; arXiv:2512.16853; arXiv:2307.06350; arXiv:2510.18701",
)
NUMBERS = {
    word: (word, f" {word}", word.capitalize(), f" {word.capitalize()}", str(digit), f" {digit}")
    for digit, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine"), start=1)
}
"""Numbers as words or digits."""
TOGETHER = (
    "Judge this generated picture point by point. It was made for this description:\n"
    '"{prompt}"\n'
    "Look only at what can be seen; take nothing for granted. The points are:\n"
    "{questions}\n"
    "For each point, in this order, first write in one sentence what the picture shows of it, then give it the score 1 "
    "if the picture meets it, else 0."
)
_FORM = 'Answer with a JSON object {{"points": [{{"reason": "...", "score": 0 or 1}}, ...]}} with exactly {} entries.'


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    ask: Literal["each", "together"] = "each"
    """Each question by itself, whose answer is read off its probabilities; or all questions of a sample at once, with
    a reason and 0 or 1 for each in words."""
    worth: Literal["share", "probability", "decision"] = "share"
    """The worth of an answer with `ask: each`."""
    question: str = "{question} Answer with Yes or No."
    """What is asked with `ask: each`: {question} stands for the question, {prompt} for the prompt."""
    question_together: str = TOGETHER
    """What is asked with `ask: together`: {questions} stands for the numbered list, {prompt} for the prompt."""
    max_tokens: int = 2048
    """Longest answer with `ask: together`."""

    def __post_init__(self) -> None:
        for name, place in (("question", "{question}"), ("question_together", "{questions}")):
            text = {"question": self.question, "question_together": self.question_together}[name]
            if place not in text:
                raise ValueError(f"{name}={text!r} must hold {place}, where the questions go")
        if self.ask == "together" and self.worth != "share":
            raise ValueError(f"worth={self.worth!r} belongs to ask: each; answers in words are 0 or 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")


def options_of(question: ListedQuestion) -> tuple[int, Mapping[str, tuple[str, ...]]]:
    """(place of the right answer, what may be answered): yes and no, or a number of one to nine.

    Raises:
        RewardError: the right answer is neither.

    >>> options_of(ListedQuestion("How many?", "4"))[0], list(options_of(ListedQuestion("Is it red?", "No"))[1])
    (3, ['yes', 'no'])
    """
    word = question.answer.strip().casefold()
    if word in YES_NO:
        return list(YES_NO).index(word), YES_NO
    place = next((place for place, forms in enumerate(NUMBERS.values()) if word in forms), None)
    if place is None:
        raise RewardError(
            f"reward 'questions': {question.text!r} has the right answer {question.answer!r}; it can be yes, no, or a "
            "number from one to nine: ask about another word by a question that is answered with yes"
        )
    return place, NUMBERS


def _filled(template: str, **values: str) -> str:
    """The template with each {name} of a value; what a value holds stays as it is.

    >>> _filled("{question} {prompt} {x}", question="{prompt}?", prompt="a")
    '{prompt}? a {x}'
    """
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], template)


def _listed(metadata: Sequence[Mapping[str, Any]]) -> list[tuple[ListedQuestion, ...]]:
    """The questions of every sample.

    Raises:
        RewardError: a record's are none, or of another form.
    """
    try:
        return [listed_questions(record) for record in metadata]
    except ValueError as error:
        raise RewardError(f"reward 'questions': a sample's record: {error}") from None


def _check(config: Config, listed: Sequence[Sequence[ListedQuestion]]) -> None:
    """Refuse a right answer that the judge cannot give, before the slow part.

    Raises:
        RewardError: naming the question.
    """
    for question in (each for questions in listed for each in questions):
        right, options = options_of(question)
        if config.ask == "together" and (options is not YES_NO or right):
            raise RewardError(
                f"reward 'questions': {question.text!r} has the right answer {question.answer!r}; ask: together takes "
                "points whose right answer is yes; use ask: each"
            )


def _each(judge: Judge, config: Config) -> AnswerFunction:
    def answers(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[float]]:
        listed = _listed(metadata)
        _check(config, listed)
        result = [[math.nan] * len(questions) for questions in listed]
        # Questions that share their options are put at once.
        kinds: dict[tuple[str, ...], Mapping[str, tuple[str, ...]]] = {}
        places: dict[tuple[str, ...], list[tuple[int, int, int]]] = defaultdict(list)
        asked: dict[tuple[str, ...], list[Question]] = defaultdict(list)
        for row, (image, questions) in enumerate(zip(images, listed, strict=True)):
            pixels = to_uint8(image)
            if pixels is None:
                continue
            for place, question in enumerate(questions):
                right, options = options_of(question)
                key = tuple(options)
                kinds[key] = options
                text = _filled(config.question, question=question.text, prompt=prompts[row])
                places[key].append((row, place, right))
                asked[key].append(Question(text, (pixels,)))
        for key, questions in asked.items():
            probabilities = option_probabilities(judge, questions, kinds[key])
            for (row, place, right), row_of in zip(places[key], probabilities, strict=True):
                result[row][place] = _worth(row_of, right, config.worth)
        return result

    return answers


def _worth(probabilities: Tensor, right: int, worth: str) -> float:
    """What the answer is worth: `probabilities` [options] float64 of the judge, NaN where the question failed."""
    if worth == "probability":
        return min(float(probabilities[right]), 1.0)
    share = float(probabilities[right] / probabilities.sum())
    return share if worth == "share" or math.isnan(share) else float(share > NO)


def _together(judge: Judge, config: Config) -> AnswerFunction:
    point = strict_fields("Point", {"reason": (str, ...), "score": (Literal[0, 1], ...)})

    def form(count: int) -> Any:
        from pydantic import Field

        return strict_fields("Points", {"points": (list[point], Field(min_length=count, max_length=count))})

    def answers(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[float]]:
        listed = _listed(metadata)
        _check(config, listed)
        result = [[math.nan] * len(questions) for questions in listed]
        rows: dict[int, list[int]] = defaultdict(list)
        asked: dict[int, list[Question]] = defaultdict(list)
        for row, (image, questions) in enumerate(zip(images, listed, strict=True)):
            pixels = to_uint8(image)
            if pixels is None:
                continue
            lines = "\n".join(f"{place}. {question.text}" for place, question in enumerate(questions, start=1))
            text = _filled(config.question_together, questions=lines, prompt=prompts[row])
            rows[len(questions)].append(row)
            asked[len(questions)].append(Question(f"{text}\n{_FORM.format(len(questions))}", (pixels,)))
        for count, questions in asked.items():
            schema = form(count)
            writing = Writing(max_tokens=config.max_tokens, schema=schema)
            for row, answer in zip(rows[count], ask_json(judge, questions, schema, writing), strict=True):
                if answer is not None:
                    result[row] = [float(each["score"]) for each in answer.model_dump()["points"]]
        return result

    return answers


def totals(answers: Sequence[float], questions: Sequence[ListedQuestion]) -> dict[str, float]:
    """The outputs of one sample by its answers."""
    values = (
        arithmetic_mean(after_parents(answers, questions)),
        geometric_mean(answers),
        math.prod(answers) if answers else math.nan,
    )
    # A mean after a parent's no would be known where a child failed; the others would not.
    failed = any(math.isnan(answer) for answer in answers)
    return dict(zip(CARD.outputs, [math.nan] * 3 if failed else values, strict=True))


def _score(answers: AnswerFunction) -> ScoreFunction:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        given = zip(answers(images, prompts, metadata), _listed(metadata), strict=True)
        rows = [list(totals(each, questions).values()) for each, questions in given]
        values = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(CARD.outputs)).float()
        return dict(zip(CARD.outputs, values.unbind(dim=1), strict=True))

    return score


def build(config: Config) -> Reward:
    made: list[AnswerFunction] = []

    def score(judge: Judge) -> ScoreFunction:
        if config.ask == "each":
            judge.check_options(YES_NO)
        made.append(_each(judge, config) if config.ask == "each" else _together(judge, config))
        return _score(made[0])

    asked = config.question if config.ask == "each" else f"{config.question_together} {config.max_tokens}"
    reward = judge_reward("questions", CARD, config, QWEN, score, config.ask, config.worth, asked)
    return dataclasses.replace(reward, answers=made[0])
