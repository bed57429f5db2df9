"""Shared by every judge: questions, counters, scales from answer probabilities, JSON answers. A helper, not a reward.

A judge is a vision-language model that is asked about images: `vlm.Local` runs one here, `chat_api.Http` asks a
server. A question that was not answered is NaN, never 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor

from flowrl.media.media import open_image
from flowrl.reward import Images, RewardError, unscored

if TYPE_CHECKING:
    from pydantic import BaseModel

log = logging.getLogger("flowrl")

Answer = TypeVar("Answer", bound="BaseModel")
Read = TypeVar("Read")

YES_NO = {
    "yes": ("Yes", " Yes", "yes", " yes", "YES", " YES"),
    "no": ("No", " No", "no", " no", "NO", " NO"),
}
DIGITS = {str(digit): (str(digit), f" {digit}") for digit in range(6)}
FIRST_SECOND = {"a": ("A", " A"), "b": ("B", " B")}
_LOW_MASS = 0.5


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """A user's turn: images, then text."""

    text: str
    images: tuple[np.ndarray, ...]
    """Each [H, W, 3] uint8."""
    exchange: tuple[str, str] | None = None
    """An answer that could not be used, and what was wrong with it: the question is asked once more."""
    jpeg_quality: int | None = None
    """Quality of the JPEG through which the images are seen; None: as they are."""

    def key(self) -> str:
        """Equal for equal text, exchange and images as they are seen."""
        digest = hashlib.sha256(repr((self.text, self.exchange, self.jpeg_quality)).encode())
        for image in self.images:
            digest.update(repr(image.shape).encode())
            digest.update(np.ascontiguousarray(image).data)
        return digest.hexdigest()

    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of the conversation; the images belong to the first."""
        if self.exchange is None:
            return [("user", self.text)]
        return [("user", self.text), ("assistant", self.exchange[0]), ("user", self.exchange[1])]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How an answer in words is made."""

    max_tokens: int = 512
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    seed: int = 0
    schema: type[BaseModel] | None = None
    """The form of the answer, for servers that can force one."""


class Counters:
    """Cost of a judge so far; safe to add to from several threads."""

    NAMES = (
        *("questions", "requests", "retries", "reasks", "failures", "low_mass"),
        *("prompt_tokens", "completion_tokens"),
    )

    def __init__(self, price_prompt: float = 0.0, price_completion: float = 0.0) -> None:
        self._prices = (price_prompt, price_completion)
        self._values = dict.fromkeys(self.NAMES, 0)
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def values(self) -> dict[str, int]:
        """Totals by name: questions put (after equal ones were joined), requests sent, retries among them, questions
        put again because the answer was unusable, questions without a usable answer, answers with little probability
        on the options, and tokens."""
        with self._lock:
            return dict(self._values)

    @property
    def cost(self) -> float:
        """In the currency of the prices, which are per million tokens."""
        values = self.values()
        return (values["prompt_tokens"] * self._prices[0] + values["completion_tokens"] * self._prices[1]) / 1e6

    def __str__(self) -> str:
        text = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in self.values().items() if value)
        return f"{text or 'nothing asked'}{f', cost {self.cost:.4f}' if any(self._prices) else ''}"


class Judge(Protocol):
    """A vision-language model that answers questions, each for itself."""

    counters: Counters
    family: str
    """Kind of model: `model_type` of its configuration, or the name that the server knows it by."""

    def check_options(self, options: Mapping[str, tuple[str, ...]]) -> None:
        """Raise RewardError where the model is known to be unable to answer with one of the options."""
        ...

    def option_logprobs(self, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]]) -> Tensor:
        """Log-probability that the answer begins with an option, its forms summed: [B, options] float64.

        A row is NaN where the question failed.
        """
        ...

    def answer_logprobs(self, questions: Sequence[Question], answer: str) -> Tensor:
        """Mean log-probability of the tokens of `answer`, over the whole vocabulary: [B] float64; NaN: failed."""
        ...

    def write(self, questions: Sequence[Question], writing: Writing) -> list[str | None]:
        """Answers in words; None where the question failed."""
        ...


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """The score function of a reward with a judge; `counters` can be read at any time."""

    name: str
    judge: Judge
    function: Callable[[Any, Sequence[str], Sequence[dict]], Tensor | Mapping[str, Tensor]]

    @property
    def counters(self) -> Counters:
        return self.judge.counters

    def __call__(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[dict]
    ) -> Tensor | Mapping[str, Tensor]:
        result = self.function(images, prompts, metadata)
        log.info("reward %s so far: %s", self.name, self.counters)
        return result


def ask_about(
    images: Images,
    texts: Sequence[str],
    *,
    sources: Sequence[np.ndarray] | None = None,
    jpeg_quality: int | None = None,
) -> list[Question | None]:
    """One question an image, after its source where there is one; None for an image that is not finite."""
    pixels = [to_uint8(image) for image in images]
    before: list[tuple[np.ndarray, ...]] = [()] * len(pixels) if sources is None else [(one,) for one in sources]
    return [
        None if p is None else Question(text, (*first, p), jpeg_quality=jpeg_quality)
        for p, first, text in zip(pixels, before, texts, strict=True)
    ]


def source_pixels(metadata: Mapping[str, Any], reward: str) -> np.ndarray:
    """[H, W, 3] uint8 of the image that was edited, upright.

    Raises:
        RewardError: there is not exactly one, or it cannot be read.
    """
    paths = metadata.get("images")
    if not isinstance(paths, Sequence) or isinstance(paths, str) or len(paths) != 1:
        raise RewardError(
            f'reward {reward!r} needs the one image that was edited in metadata["images"], got {paths!r}; give '
            "its path under 'image' in a .jsonl prompt file"
        )
    try:
        return np.array(open_image(paths[0]))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(f"reward {reward!r} cannot read the source image {paths[0]!r}: {error}") from error


def where_asked(questions: Sequence[Question | None], ask: Callable[[list[Question]], Tensor]) -> Tensor:
    """`ask` on the questions that exist, NaN for the others; [B, ...] float64."""
    rows = [row for row, question in enumerate(questions) if question is not None]
    values = ask([question for question in questions if question is not None]).double()
    result = torch.full((len(questions), *values.shape[1:]), torch.nan, dtype=torch.float64)
    result[rows] = values
    return result


def yes_share(judge: Judge, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]] = YES_NO) -> Tensor:
    """P(first option) / (P(first) + P(second)), [B]: sigmoid of the difference of their log-probabilities."""
    first, second = _watched(judge, questions, options).unbind(dim=1)
    return (first - second).sigmoid()


def expected_digit(judge: Judge, questions: Sequence[Question]) -> Tensor:
    """Expected digit, 0 to 5, under the probabilities of the six digits; [B]."""
    probabilities = _watched(judge, questions, DIGITS).softmax(dim=1)
    return probabilities @ torch.arange(6, dtype=probabilities.dtype)


def option_probabilities(judge: Judge, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]]) -> Tensor:
    """P(option) over the whole vocabulary, [B, options] float64; a row is NaN where the question failed.

    Of a server's options that it does not list the upper bound counts.
    """
    return _watched(judge, questions, options).exp()


def _watched(judge: Judge, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]]) -> Tensor:
    """Log-probabilities of the options; warns where most answers begin otherwise, which no score would show."""
    if not questions:
        return torch.empty(0, len(options), dtype=torch.float64)
    values = judge.option_logprobs(questions, options)
    mass = values.exp().sum(dim=1)
    answered = mass[~mass.isnan()]
    low = int((answered < _LOW_MASS).sum())
    judge.counters.add(low_mass=low)
    if 2 * low > len(answered):
        log.warning(
            "a judge puts only %.2g (median) of its probability on the answers %s: its chat template or its thinking "
            "mode is wrong, or the question does not ask for them",
            float(answered.median()),
            "/".join(options),
        )
    return values


def ask_json(
    judge: Judge, questions: Sequence[Question], schema: type[Answer], writing: Writing
) -> list[Answer | None]:
    """Answers in the form of `schema`; an unusable one is asked for once more with the error, then None."""
    answers: list[Answer | None] = [None] * len(questions)
    again: dict[int, Question] = {}
    for row, text in enumerate(judge.write(questions, writing)):
        if text is None:
            continue
        answers[row], wrong = _read_json(text, schema)
        if wrong is not None:
            complaint = f"That answer cannot be used: {wrong}. Answer again, with the JSON object alone."
            again[row] = dataclasses.replace(questions[row], exchange=(text, complaint))
    if again:
        judge.counters.add(reasks=len({question.key() for question in again.values()}))
        for row, text in zip(again, judge.write(list(again.values()), writing), strict=True):
            if text is None:
                continue
            answers[row], wrong = _read_json(text, schema)
            if wrong is not None:
                judge.counters.add(failures=1)
                unscored(f"a judge's answer could not be used twice, the sample is masked: {wrong}")
    return answers


def ask_written(
    judge: Judge, questions: Sequence[Question], read: Callable[[str], Read | None], writing: Writing, reward: str
) -> list[Read | None]:
    """What `read` finds in the answers; None where a question failed or nothing was found, and it is not put again."""
    answers = judge.write(questions, writing)
    found = [None if answer is None else read(answer) for answer in answers]
    unread = [answer for answer, values in zip(answers, found, strict=True) if answer is not None and values is None]
    judge.counters.add(failures=len(unread))
    if unread:
        log.warning("reward %s: %d answers hold no grades, such as %r", reward, len(unread), unread[0][:200])
    return found


def _read_json(text: str, schema: type[Answer]) -> tuple[Answer | None, str | None]:
    """(answer, None) or (None, what is wrong); what stands around the outermost braces is passed over."""
    from pydantic import ValidationError

    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None, "it holds no JSON object"
    try:
        return schema.model_validate_json(text[start : end + 1]), None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'JSON'}: {e['msg']}" for e in error.errors()[:4]]
        return None, "; ".join(problems)


def strict_fields(name: str, fields: Mapping[str, Any]) -> type[BaseModel]:
    """A pydantic model of exactly these fields, no conversions; `fields` as `pydantic.create_model` takes them."""
    from pydantic import ConfigDict, create_model

    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def read_text(path: str, reward: str, what: str) -> str:
    """A user's UTF-8 file.

    Raises:
        RewardError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward {reward!r}: {what} {path!r} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Grouped:
    """Answers of several questions a sample, put together; `unique` holds each distinct question once."""

    unique: list[Question]
    places: list[int]
    """Question -> its place in `unique`."""


def joined(questions: Sequence[Question]) -> Grouped:
    """Equal questions are put once."""
    unique: list[Question] = []
    places: list[int] = []
    known: dict[str, int] = {}
    for question in questions:
        place = known.setdefault(question.key(), len(unique))
        if place == len(unique):
            unique.append(question)
        places.append(place)
    return Grouped(unique, places)


def mean_or_nan(values: Sequence[float]) -> float:
    """Mean of those that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
