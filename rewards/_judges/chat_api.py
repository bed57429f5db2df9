"""A judge on any server that speaks OpenAI's chat API: vLLM, SGLang, hosted ones. A helper, not a reward.

Questions go out side by side, at most `concurrency` at a time. Connection errors, timeouts and the statuses 408, 429
and 5xx are tried again after a growing, jittered wait, or after the server's Retry-After, until the deadline; then the
question has failed, which is NaN. The API key is read from an environment variable and kept out of logs and errors.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import email.utils
import io
import json
import math
import os
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from flowrl.rewards._judges.base import Counters, Question, Writing, joined
from flowrl.rewards._vision.arrays import jpeg
from PIL import Image
from torch import Tensor

from flowrl.core.errors import Remedy
from flowrl.core.strict import require_not_negative
from flowrl.core.subprocesses import require_patience
from flowrl.reward import RewardError, unscored

_RETRIED = {408, 409, 425, 429}
_REFUSED = {401: "the API key", 403: "the API key's rights", 404: "base_url and model"}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


@dataclass(frozen=True, kw_only=True)
class Http:
    """A judge on a server."""

    base_url: str = "http://localhost:8000/v1"
    model: str = ""
    """The name the server knows the model by; required."""
    api_key_env: str | None = None
    """Environment variable that holds the key; none sends no key (a server of your own)."""
    concurrency: int = 32
    """Requests under way at once."""
    timeout_s: float = 60.0
    """For one request, from sending to the last byte."""
    deadline_s: float = 300.0
    """For one question with all its tries and waits, counted from its first request."""
    retries: int = 8
    """Further tries of one question."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How a JSON answer is demanded, as far as the server can; it is checked in any case."""
    top_logprobs: int = 20
    """Likeliest first tokens that the server lists."""
    token_limit: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """Name of the limit in the server's API; older ones know `max_tokens` alone."""
    disable_thinking: bool = True
    """Sends chat_template_kwargs {enable_thinking: false}; set false for servers that refuse unknown keys (OpenAI)."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further keys of every request."""
    price_prompt: float = 0.0
    """Price of a million prompt tokens, for the cost counter."""
    price_completion: float = 0.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "timeout_s", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        require_patience("deadline_s", self.deadline_s)
        require_not_negative(vars(self), "retries", "price_prompt", "price_completion")
        if not 2 <= self.top_logprobs <= 20:
            raise ValueError(f"top_logprobs={self.top_logprobs} must be between 2 and 20")


class _Unusable(Exception):
    """A reply of status 200 that is no chat completion; tried again."""


class HttpJudge:
    """The server as a judge; see `base.Judge`."""

    def __init__(self, config: Http, reward: str) -> None:
        self.config, self.reward, self.family = config, reward, config.model
        self.counters = Counters(config.price_prompt, config.price_completion)
        self._key = _api_key(config, reward)
        self._unreachable = False
        """No server answered the last question, in all its tries: the next ones try once until one succeeds."""
        # Of its own: waits must not move the random numbers of the training.
        self._jitter = random.Random(os.getpid())

    def check_options(self, options: Mapping[str, tuple[str, ...]]) -> None:
        """The server's tokens are not known before it has answered."""

    def option_logprobs(self, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]]) -> Tensor:
        listed = self._first_tokens(questions)
        rows = [_option_row(tokens, options) for tokens in listed]
        # None of the options is listed: the answer is something else, and any number would be made up.
        strange = [q for q, row, tokens in zip(questions, rows, listed, strict=True) if tokens is not None and not row]
        self.counters.add(failures=len({question.key() for question in strange}))
        nan = [math.nan] * len(options)
        return torch.tensor([row or nan for row in rows], dtype=torch.float64).reshape(len(rows), len(options))

    def answer_logprobs(self, questions: Sequence[Question], answer: str) -> Tensor:
        """The first token alone can be asked for, so `answer` must be one token of the server's model."""
        wanted = answer.strip()
        values = []
        for tokens in self._first_tokens(questions):
            if tokens is None:
                values.append(math.nan)
                continue
            matching = [value for token, value in tokens.items() if _bare(token) == wanted]
            values.append(_log_sum(matching) if matching else min(tokens.values()))
        return torch.tensor(values, dtype=torch.float64)

    def write(self, questions: Sequence[Question], writing: Writing) -> list[str | None]:
        body: dict[str, Any] = {"temperature": writing.temperature, "seed": writing.seed}
        body[self.config.token_limit] = writing.max_tokens
        if writing.schema is not None and self.config.structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif writing.schema is not None and self.config.structured == "json_schema":
            form = {"name": writing.schema.__name__, "schema": writing.schema.model_json_schema(), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return [None if choice is None else choice.message.content or "" for choice in self._ask(questions, body)]

    def _first_tokens(self, questions: Sequence[Question]) -> list[dict[str, float] | None]:
        """Log-probabilities of the listed first tokens of each answer; None where the question failed.

        Raises:
            RewardError: the server gives no log-probabilities.
        """
        body = {
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": self.config.top_logprobs,
            self.config.token_limit: 1,
        }
        result: list[dict[str, float] | None] = []
        for choice in self._ask(questions, body):
            positions = choice.logprobs.content if choice is not None and choice.logprobs is not None else None
            if choice is not None and not (positions and positions[0].top_logprobs):
                raise RewardError(
                    f"reward {self.reward!r}: the server at {self.config.base_url} gives no log-probabilities of "
                    f"{self.config.model!r}; use a rubric of scale 'score', or a server that gives them (vLLM, SGLang)"
                )
            result.append({t.token: t.logprob for t in positions[0].top_logprobs} if positions else None)
        return result

    def _ask(self, questions: Sequence[Question], body: Mapping[str, Any]) -> list[Any]:
        """The first choice of each reply, in the order of the questions; None: failed. Equal questions are put once."""
        group = joined(questions)
        self.counters.add(questions=len(group.unique))
        if not group.unique:
            return []
        replies, errors = _run(self._ask_all(group.unique, body))
        if errors:
            self.counters.add(failures=len(errors))
            many = f"{len(errors)} of {len(group.unique)}"
            unscored(f"reward {self.reward}: {many} questions failed and are masked; the last: {errors[-1]}")
        return [replies[place] for place in group.places]

    async def _ask_all(self, questions: Sequence[Question], body: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        from openai import AsyncOpenAI

        errors: list[str] = []
        gate = asyncio.Semaphore(self.config.concurrency)
        async with AsyncOpenAI(base_url=self.config.base_url, api_key=self._key or "none", max_retries=0) as client:
            tasks = [asyncio.ensure_future(self._ask_one(client, gate, q, body, errors)) for q in questions]
            try:
                return list(await asyncio.gather(*tasks)), errors
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask_one(
        self, client: Any, gate: asyncio.Semaphore, question: Question, body: Mapping[str, Any], errors: list[str]
    ) -> Any:
        """One question with its retries; None, and a line in `errors`, where it failed."""
        async with gate:
            # Built only now: images of questions that wait are not held in base 64.
            request = {"model": self.config.model, "messages": _messages(question), **body, "extra_body": self._extra()}
            end = time.monotonic() + self.config.deadline_s
            tries = 1 if self._unreachable else self.config.retries + 1
            for attempt in range(tries):
                self.counters.add(requests=1, retries=int(attempt > 0))
                left = min(self.config.timeout_s, end - time.monotonic())
                try:
                    # The client's own timeout starts anew with every byte.
                    async with asyncio.timeout(left):
                        choice = self._choice(await client.chat.completions.create(**request, timeout=left))
                    self._unreachable = False
                    return choice
                except Exception as error:  # sorted into: ask again, give up, or stop the run
                    wait, unreachable = self._wait(error, attempt), _nobody_listens(error)
                    problem = self._redacted(f"{type(error).__name__}: {error}")
                if wait is None or attempt + 1 == tries or time.monotonic() + wait >= end:
                    break
                await asyncio.sleep(wait)
            self._unreachable = unreachable
            errors.append(f"{problem} (after {attempt + 1} tries)")
            return None

    def _choice(self, reply: Any) -> Any:
        """The first choice of a chat completion; its tokens are counted."""
        choices = getattr(reply, "choices", None)
        if not choices or getattr(choices[0], "message", None) is None:
            raise _Unusable(f"the reply is no chat completion: {str(reply)[:200]!r}")
        if reply.usage is not None:
            self.counters.add(
                prompt_tokens=reply.usage.prompt_tokens or 0, completion_tokens=reply.usage.completion_tokens or 0
            )
        return choices[0]

    def _wait(self, error: Exception, attempt: int) -> float | None:
        """Seconds until the next try; None where it would be in vain.

        Raises:
            RewardError: no question can succeed; the server refuses the key, or knows no such model.
        """
        import openai

        wait = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt) * self._jitter.uniform(0.5, 1.5)
        if isinstance(error, openai.APIStatusError):
            if error.status_code in _REFUSED:
                raise RewardError(
                    f"reward {self.reward!r}: the server at {self.config.base_url} answers {error.status_code}; check "
                    f"{_REFUSED[error.status_code]} (model={self.config.model!r}, "
                    f"api_key_env={self.config.api_key_env!r})"
                ) from None
            if error.status_code not in _RETRIED and error.status_code < 500:
                return None
            return max(wait, _retry_after(error.response.headers.get("retry-after")))
        unusable = (openai.APIConnectionError, openai.APIResponseValidationError, TimeoutError, json.JSONDecodeError)
        if isinstance(error, (*unusable, _Unusable)):
            return wait
        raise error

    def _extra(self) -> dict[str, Any]:
        thinking = {"chat_template_kwargs": {"enable_thinking": False}} if self.config.disable_thinking else {}
        return thinking | self.config.extra_body

    def _redacted(self, text: str) -> str:
        return (text.replace(self._key, "***") if self._key else text)[:500]


def _nobody_listens(error: Exception) -> bool:
    import openai

    return isinstance(error, openai.APIConnectionError) and not isinstance(error, openai.APITimeoutError)


def _api_key(config: Http, reward: str) -> str | None:
    if not config.model:
        raise RewardError(f"reward {reward!r}: http.model is required: the name the server knows the model by")
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise RewardError(
            f"reward {reward!r}: http.api_key_env={config.api_key_env!r}, but the environment has no such variable; "
            "export it, or leave the option out for a server without keys"
        )
    return key


def load(config: Http, reward: str) -> HttpJudge:
    """A judge on a server; nothing is sent yet.

    Raises:
        RewardError: the openai package is missing, no model is named, or the key's variable is not set.
    """
    try:
        import openai  # noqa: F401
    except ModuleNotFoundError as error:
        raise RewardError(
            f"reward {reward!r} needs a package that is not installed ({error.name})",
            Remedy(command="pip install 'flowrl[vlm]'"),
        ) from error
    return HttpJudge(config, reward)


def data_url(pixels: np.ndarray, jpeg_quality: int | None = None) -> str:
    """[H, W, 3] uint8 as a lossless PNG, or as a JPEG, which changes what the judge sees."""
    if jpeg_quality is not None:
        return f"data:image/jpeg;base64,{base64.b64encode(jpeg(pixels, jpeg_quality)).decode()}"
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _messages(question: Question) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in question.turns()]
    urls = [data_url(image, question.jpeg_quality) for image in question.images]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages[0]["content"] = [*images, {"type": "text", "text": question.text}]
    return messages


def _bare(token: str) -> str:
    """A token without its space, also where the server shows the tokenizer's own mark for one."""
    return token.strip(" \t\n\u2581\u0120")


def _log_sum(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).logsumexp(dim=0))


def _option_row(tokens: Mapping[str, float] | None, options: Mapping[str, tuple[str, ...]]) -> list[float] | None:
    """Log-probability of each option, case and space ignored; one that is not listed gets the smallest listed value.

    That is its upper bound: minus infinity would drive the score to 0 or 1. None where no option is listed.
    """
    if tokens is None:
        return None
    known = [{form.strip().casefold() for form in forms} for forms in options.values()]
    matching = [[v for token, v in tokens.items() if _bare(token).casefold() in forms] for forms in known]
    if not any(matching):
        return None
    bound = min(tokens.values())
    return [_log_sum(values) if values else bound for values in matching]


def _retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 without a readable one.

    >>> _retry_after("1.5"), _retry_after(None), _retry_after("soon")
    (1.5, 0.0, 0.0)
    """
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where this thread already runs an event loop (a notebook, a server)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
