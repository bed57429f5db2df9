"""questions: probabilities of a tiny random LLaVA's answers, and 0 or 1 with reasons of a server."""

import json
from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards._judges.chat_api import Http
from flowrl.rewards.questions import Config, build

from flowrl.contracts.rewards import trial_batch
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests.fake_chat import FakeChat, Reply, Request
from tests.tiny_rewards import judges, records

EACH = ["Is it red?", {"text": "Is it round?", "parents": [1]}, {"text": "How many are there?", "answer": "two"}]
TOGETHER = ["Colour: it is red", "Shape: it is round"]


def reply(request: Request) -> Reply:
    """Points that follow the brightness of the image."""
    bright = int(request.images[-1].mean())
    points = [{"reason": "so", "score": bright // 2**place % 2} for place in range(request.text.count(". "))]
    return Reply(text=json.dumps({"points": points[: len(TOGETHER)]}))


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    llava, chat = judges.local(folder), FakeChat()
    stack.callback(chat.stop)
    chat.reset(reply)
    http = Http(base_url=chat.url, model="fake")
    return {
        "each": build(Config(local=llava)),
        "together": build(Config(backend="http", http=http, ask="together")),
    }


def samples(reward: Reward, folder: Path) -> Batch:
    together = reward.card.overlap
    return records(trial_batch(reward.card), {"questions": TOGETHER if together else EACH})
