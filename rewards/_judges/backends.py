"""The judge of a reward: the options all judges have, and loading one. A helper, not a reward."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrl.rewards._judges import chat_api, vlm
from flowrl.rewards._judges.base import Judge, JudgeScore
from flowrl.rewards._judges.chat_api import Http
from flowrl.rewards._judges.vlm import Local

from flowrl.reward import Card, Reward, ScoreFunction

QWEN = Local(model="Qwen/Qwen3-VL-4B-Instruct")
"""The judge of rewards that ask for none in particular."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Options of a reward that asks a judge."""

    backend: Literal["local", "http"] = "local"
    """A model of transformers in this process, or a server that speaks OpenAI's chat API."""
    local: Local = field(default_factory=Local)
    http: Http = field(default_factory=Http)

    def resolved(self, default: Local) -> Local:
        """`local` with the reward's own model where none is named."""
        if self.local.model is not None:
            return self.local
        adapter = self.local.adapter or default.adapter
        return dataclasses.replace(self.local, model=default.model, adapter=adapter)

    def load(self, reward: str, default: Local) -> Judge:
        """The judge.

        Raises:
            RewardError: the weights, a package or the API key is missing.
        """
        if self.backend == "http":
            return chat_api.load(self.http, reward)
        return vlm.load(self.resolved(default), reward)

    def identity(self, default: Local) -> str:
        """The parts of the judge that decide a score."""
        if self.backend == "http":
            return f"{self.http.base_url} {self.http.model} {self.http.extra_body}"
        local = self.resolved(default)
        return f"{local.model} {local.adapter} {local.dtype}"


def judge_card(*outputs: str, **own: Any) -> Card:
    """A card with what the judges of images have in common; `own` comes before it.

    Memory and precision are those of a judge of 4 billion parameters in bfloat16.
    """
    sees = "as the judge's processor takes it; Qwen-VL keeps the aspect"
    common: dict[str, Any] = {"low": 0.0, "high": 1.0, "modality": "image", "resolution": sees, "memory_gib": 8.3}
    common["half_precision"] = True
    return Card(outputs=outputs, **(common | own))


def judge_reward(
    name: str, card: Card, config: Backend, default: Local, score: Callable[[Judge], ScoreFunction], *text: str
) -> Reward:
    """The reward with its judge loaded; the version of its card names the judge and the `text` of the questions."""
    judge = config.load(name, default)
    return reward_of_judge(judge, name, card, config, default, score(judge), *text)


def reward_of_judge(
    judge: Judge, name: str, card: Card, config: Backend, default: Local, score: ScoreFunction, *text: str
) -> Reward:
    """The same with a judge that is loaded already, for questions that depend on it."""
    digest = hashlib.sha256(repr((config.backend, config.identity(default), *text)).encode()).hexdigest()[:12]
    memory = judge.memory_gib if isinstance(judge, vlm.LocalJudge) else 0.0
    remote = config.backend == "http"
    card = dataclasses.replace(
        card,
        memory_gib=memory,
        version=f"{card.version}-{digest}",
        overlap=remote,  # a server leaves this process idle
        repeatable=not remote,
        half_precision=not remote and config.local.dtype != "float32",
    )
    return Reward(score=JudgeScore(name, judge, score), card=card)
