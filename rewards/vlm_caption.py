"""DDPO's prompt alignment: a vision-language model says what it sees, and BERTScore compares that with the prompt.

mode `bertscore`: the judge answers "Answer concisely: what is going on in this image?"; raw is BERTScore's recall of
the reference "The image contains {prompt}" in that answer, precision and F1 are reported beside it.
mode `strict`: the judge answers each of the record's `questions`; raw is the share of them whose string in `answers`
occurs in its answer, letter by letter.

A sample with a question that was not answered, or answered with nothing, is NaN. The judge sees images through JPEG
of quality 80, as the paper's did, unless `jpeg_quality` is null.

The paper's LLaVA of 13 billion parameters is older than the one that transformers loads; its server compared with
microsoft/deberta-xlarge-mnli (`bertscore: {model: ...}`), here it is roberta-large, BERTScore's choice for English.
The reward rises noisily, and reproductions often fail (kvablack/ddpo-pytorch#11, #23).

Source: arXiv:2305.13301; kvablack/ddpo-pytorch and kvablack/LLaVA-server; BERTScore: arXiv:1904.09675.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from flowrl.rewards._judges import bert
from flowrl.rewards._judges.backends import Backend, judge_card, judge_reward
from flowrl.rewards._judges.base import Judge, Question, Writing, ask_about, where_asked
from flowrl.rewards._judges.bert import BertScore
from flowrl.rewards._judges.vlm import Local
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor

from flowrl.reward import Card, Images, Reward, RewardError, ScoreFunction

LEVEL = "experimental"
DEFAULT = Local(model="llava-hf/llava-1.5-13b-hf")
CARD = judge_card(
    *("vlm_caption_recall", "vlm_caption_precision", "vlm_caption_f1"),
    low=-1.0,
    resolution="as the judge's processor takes it; LLaVA-1.5 sees the centre square, 336 x 336",
    memory_gib=26.2,
    level=LEVEL,
    licence="Llama 2 (LLaVA-1.5; unverified), MIT (roberta-large); another judge's own",
    source="DDPO, arXiv:2305.13301",
)


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    mode: Literal["bertscore", "strict"] = "bertscore"
    """Scored answers: to `question`, or to the record's own questions."""
    question: str = "Answer concisely: what is going on in this image?"
    reference: str = "The image contains {}"
    """Text that the answer is compared with; {} stands for the prompt."""
    bertscore: bert.Options = field(default_factory=bert.Options)
    jpeg_quality: int | None = 80
    """Quality of the JPEG through which the judge sees an image, 1 to 95; null: the image itself, without loss."""
    max_tokens: int = 64
    """Longest answer."""

    def __post_init__(self) -> None:
        if "{}" not in self.reference:
            raise ValueError(f"reference={self.reference!r} must hold {{}}, where the prompt goes")
        if self.jpeg_quality is not None and not 1 <= self.jpeg_quality <= 95:
            raise ValueError(f"jpeg_quality={self.jpeg_quality} must be from 1 to 95, or null")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")


def card_of(config: Config) -> Card:
    if config.mode == "bertscore":
        return CARD
    return replace(CARD, outputs=("vlm_caption_strict",), low=0.0, requires=("questions", "answers"))


def _answers(judge: Judge, questions: Sequence[Question], config: Config) -> list[str | None]:
    """None where a question failed; nothing said is no answer."""
    result = judge.write(questions, Writing(max_tokens=config.max_tokens))
    judge.counters.add(failures=sum(text is not None and not text.strip() for text in result))
    return [text if text is not None and text.strip() else None for text in result]


def _by_bertscore(judge: Judge, config: Config, compare: BertScore) -> ScoreFunction:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        questions = ask_about(images, [config.question] * len(prompts), jpeg_quality=config.jpeg_quality)
        references = [
            config.reference.replace("{}", prompt)
            for prompt, question in zip(prompts, questions, strict=True)
            if question is not None
        ]

        def ask(asked: list[Question]) -> Tensor:
            answers = _answers(judge, asked, config)
            answered = [row for row, answer in enumerate(answers) if answer is not None]
            values = torch.full((len(asked), 3), torch.nan, dtype=torch.float64)
            values[answered] = compare([str(answers[row]) for row in answered], [references[row] for row in answered])
            return values

        return dict(zip(CARD.outputs, where_asked(questions, ask).float().unbind(dim=1), strict=True))

    return score


def _texts(value: object) -> list[str]:
    """A list of strings of which none is empty; [] for anything else."""
    if not isinstance(value, list):
        return []
    texts = [text for text in value if isinstance(text, str) and text]
    return texts if len(texts) == len(value) else []


def questions_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(question, string that its answer must hold) of a prompt's record.

    Raises:
        RewardError: no lists of the same length, or an empty one.
    """
    lists = [_texts(record.get(name)) for name in ("questions", "answers")]
    if not lists[0] or len(lists[0]) != len(lists[1]):
        raise RewardError(
            'reward \'vlm_caption\' in mode strict needs as many strings under "answers" as under "questions", at '
            f"least one, in every record; got questions={record.get('questions')!r}, answers={record.get('answers')!r}"
        )
    return list(zip(*lists, strict=True))


def _strict(judge: Judge, config: Config) -> ScoreFunction:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        # All records first: a bad one is the user's mistake, and is refused before the slow part.
        wanted = [questions_of(record) for record in metadata]
        pixels = [to_uint8(image) for image in images]
        asked = [
            (row, truth, Question(text, (shown,), jpeg_quality=config.jpeg_quality))
            for row, (shown, pairs) in enumerate(zip(pixels, wanted, strict=True))
            if shown is not None
            for text, truth in pairs
        ]
        right: list[list[float]] = [[] for _ in prompts]
        answers = _answers(judge, [question for _, _, question in asked], config)
        for (row, truth, _), answer in zip(asked, answers, strict=True):
            right[row].append(math.nan if answer is None else float(truth in answer))
        return torch.tensor([sum(row) / len(row) if row else math.nan for row in right])

    return score


def build(config: Config) -> Reward:
    card = card_of(config)
    asked = f"{config.mode} {config.jpeg_quality} {config.max_tokens}"
    if config.mode == "strict":
        return judge_reward("vlm_caption", card, config, DEFAULT, lambda judge: _strict(judge, config), asked)
    # The smaller one first: what it lacks is reported before the judge is loaded.
    compare = bert.load(config.bertscore, "vlm_caption")
    identity = config.question, config.reference, f"{config.bertscore.model} {config.bertscore.depth}"
    how = judge_reward(
        "vlm_caption", card, config, DEFAULT, lambda judge: _by_bertscore(judge, config, compare), asked, *identity
    )
    return Reward(how.score, replace(how.card, memory_gib=how.card.memory_gib + compare.memory_gib))
