"""A vision-language model judges the image by a rubric: yes or no, 0 to 5, numbers by axis, or in pairs.

The rubric (`rewards/rubrics/*.yaml`, or a file of yours) holds the question and its scale; raw by scale:

- yes_no: P(Yes) / (P(Yes) + P(No)) of the first answer token, 0 to 1;
- expectation: the expected digit of 0 to 5 under their probabilities, divided by 5;
- score: a JSON answer with a number an axis; raw is the weighted mean, every axis is reported beside it;
- written: reasons and a line `## Score:` an axis; raw is the weighted mean of those that are not N/A, trained as
  (raw - low) / (high - low);
- pairwise: every ordered pair of the images of a prompt is judged; raw is the share of the others that an image
  beats. It beats another where it wins in both orders; where the orders disagree, the mean probability counts.

A rubric with `source` judges an edit: the judge sees the image that was edited (metadata["images"], one path), then the
result.

docs/rewards/judges.md tells how to run either backend, what it costs, and what goes wrong.

Source: yes_no and digits: VQAScore (arXiv:2404.01291) and Edit-R1's token probabilities; written: RationalRewards
(TIGER-AI-Lab/RationalRewards); pairwise: Pref-GRPO (CodeGoat24/Pref-GRPO), here with both orders.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from flowrl.rewards._judges import rubrics
from flowrl.rewards._judges.backends import QWEN, Backend, judge_card, judge_reward, reward_of_judge
from flowrl.rewards._judges.base import (
    DIGITS,
    FIRST_SECOND,
    YES_NO,
    Judge,
    Question,
    Writing,
    ask_about,
    ask_json,
    ask_written,
    expected_digit,
    source_pixels,
    where_asked,
    yes_share,
)
from flowrl.rewards._judges.rubrics import Rubric
from flowrl.rewards._vision.arrays import to_uint8
from flowrl.rewards.diversity import groups_of
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.core.strict import require_positive
from flowrl.reward import Card, CompareFunction, Images, Reward, RewardError, ScoreFunction

LEVEL = "experimental"
CARD = judge_card(
    "vlm_judge",
    level=LEVEL,
    licence="Apache-2.0 (Qwen3-VL; unverified); another judge's own",
    source="arXiv:2404.01291; PKU-YuanGroup/Edit-R1; TIGER-AI-Lab/RationalRewards; CodeGoat24/Pref-GRPO",
)


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    rubric: Annotated[str, NAME_OR_PATH] = "alignment"
    """A built-in rubric (alignment, alignment_digits, quality, preference, edit_digits, rational_edit, imgedit,
    wise_legacy, wise_verified), or the path of a .yaml file of yours."""
    max_tokens: int = 512
    """Longest answer of a rubric of scale `score`; one of scale `written` has four times as much."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "max_tokens")


def win_rates(first_wins: Tensor) -> Tensor:
    """Share of the others that each of n images beats, [n], from both orders of every pair.

    Args:
        first_wins: [n, n]; entry (i, j) is the probability that i, shown first, is preferred to j; NaN: not known.

    A pair whose orders disagree (the judge follows the place) counts as the mean probability, so equal images get
    1/2. An image of which fewer than half the pairs are known is NaN.

    >>> win_rates(torch.tensor([[torch.nan, 0.9], [0.2, torch.nan]])).tolist()
    [1.0, 0.0]
    >>> win_rates(torch.tensor([[torch.nan, 0.75], [0.5, torch.nan]])).tolist()
    [0.625, 0.375]
    """
    count = len(first_wins)
    second_wins = 1 - first_wins.T
    agreed = (first_wins - 0.5).sign() * (second_wins - 0.5).sign() > 0
    beaten = torch.where(agreed, (first_wins > 0.5).to(first_wins), (first_wins + second_wins) / 2)
    beaten = beaten.fill_diagonal_(torch.nan)
    known = (~beaten.isnan()).sum(dim=1)
    return torch.where(2 * known >= max(count - 1, 1), beaten.nanmean(dim=1), torch.nan)


def _pairwise(judge: Judge, rubric: Rubric) -> ScoreFunction:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        groups = groups_of(prompts, metadata)
        alone = next((rows[0] for rows in groups if len(rows) < 2), None)
        if alone is not None:
            raise RewardError(
                f"reward 'vlm_judge': the prompt {prompts[alone]!r} has one image, and a pairwise rubric compares "
                "the images of a prompt; take 2 or more a prompt, or a rubric of another scale"
            )
        pixels = [to_uint8(image) for image in images]
        pairs, questions = [], []
        for number, rows in enumerate(groups):
            for i, j in itertools.permutations(range(len(rows)), 2):
                first, second = pixels[rows[i]], pixels[rows[j]]
                if first is None or second is None:
                    continue
                pairs.append((number, i, j))
                questions.append(Question(rubric.ask(prompts[rows[i]], metadata[rows[i]]), (first, second)))
        tables = [torch.full((len(rows), len(rows)), torch.nan, dtype=torch.float64) for rows in groups]
        for (number, i, j), value in zip(pairs, yes_share(judge, questions, FIRST_SECOND).tolist(), strict=True):
            tables[number][i, j] = value
        result = torch.full((len(prompts),), torch.nan)
        for rows, table in zip(groups, tables, strict=True):
            # A broken image says nothing about the others.
            whole = [i for i, row in enumerate(rows) if pixels[row] is not None]
            result[[rows[i] for i in whole]] = win_rates(table[whole][:, whole]).float()
        return result

    return score


def _asked(rubric: Rubric, images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> list[Question | None]:
    """The question about each sample."""
    texts = [rubric.ask(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
    sources = [source_pixels(record, "vlm_judge") for record in metadata] if rubric.source else None
    return ask_about(images, texts, sources=sources)


def _comparison(judge: Judge, rubric: Rubric) -> CompareFunction:
    def compare(first: Images, second: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        pairs = zip(map(to_uint8, first), map(to_uint8, second), prompts, metadata, strict=True)
        questions = [
            None if a is None or b is None else Question(rubric.ask(prompt, record), (a, b))
            for a, b, prompt, record in pairs
        ]
        return where_asked(questions, lambda asked: yes_share(judge, asked, FIRST_SECOND))

    return compare


def _by_probability(judge: Judge, rubric: Rubric) -> ScoreFunction:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        questions = _asked(rubric, images, prompts, metadata)
        if rubric.scale == "yes_no":
            return where_asked(questions, lambda asked: yes_share(judge, asked)).float()
        return where_asked(questions, lambda asked: expected_digit(judge, asked) / 5).float()

    return score


def _by_axes(judge: Judge, rubric: Rubric, names: Sequence[str], max_tokens: int) -> ScoreFunction:
    form = rubric.form()

    def answers(questions: list[Question]) -> Sequence[Mapping[str, float] | None]:
        if rubric.scale == "written":
            return ask_written(judge, questions, rubric.read, Writing(max_tokens=4 * max_tokens), "vlm_judge")
        found = ask_json(judge, questions, form, Writing(max_tokens=max_tokens, schema=form))
        return [None if answer is None else answer.model_dump() for answer in found]

    def ask(questions: list[Question]) -> Tensor:
        rows = [
            [math.nan] * len(names) if row is None else [rubric.total(row), *(row[axis] for axis in rubric.axes)]
            for row in answers(questions)
        ]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(names))

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        values = where_asked(_asked(rubric, images, prompts, metadata), ask).float()
        return dict(zip(names, values.unbind(dim=1), strict=True))

    return score


def card_of(config: Config) -> Card:
    rubric = rubrics.load(config.rubric, "vlm_judge")
    shown = tuple(key for key in rubric.fields if key not in rubric.defaults)
    card = dataclasses.replace(CARD, needs_groups=rubric.scale == "pairwise", requires=shown)
    if rubric.source:
        card = dataclasses.replace(card, modality="edit", requires=("images", *shown))
    if not rubric.axes:
        return card
    names = ("vlm_judge", *(f"vlm_judge_{axis}" for axis in rubric.axes))
    card = dataclasses.replace(card, outputs=names, low=rubric.low, high=rubric.high)
    width = rubric.high - rubric.low
    return dataclasses.replace(card, transform=(1 / width, -rubric.low / width)) if rubric.scale == "written" else card


def build(config: Config) -> Reward:
    rubric, card = rubrics.load(config.rubric, "vlm_judge"), card_of(config)
    text = rubric.model_dump_json()
    if rubric.axes:
        tokens = config.max_tokens
        return judge_reward(
            "vlm_judge", card, config, QWEN, lambda judge: _by_axes(judge, rubric, card.outputs, tokens), text
        )
    how = _pairwise if rubric.scale == "pairwise" else _by_probability
    options = {"yes_no": YES_NO, "expectation": DIGITS, "pairwise": FIRST_SECOND}[rubric.scale]

    judge = config.load("vlm_judge", QWEN)
    judge.check_options(options)
    reward = reward_of_judge(judge, "vlm_judge", card, config, QWEN, how(judge, rubric), text)
    compare = _comparison(judge, rubric) if rubric.scale == "pairwise" else None
    return dataclasses.replace(reward, compare=compare)
