"""What the tiny judges share: a random LLaVA, a server whose grades follow the brightness, and a scripted judge."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flowrl.rewards._judges.base import Counters
from flowrl.rewards._judges.chat_api import Http
from flowrl.rewards._judges.vlm import Local

from tests import toy_vlm
from tests.fake_chat import FakeChat, Reply, Request


def local(folder: Path) -> Local:
    return Local(model=toy_vlm.save(folder, "llava"), dtype="float32", device="cpu", batch_size=3)


def grade(request: Request) -> float:
    """From 1 to 5 by the last image and the length of the question."""
    return 1 + (float(request.images[-1].mean()) + len(request.text)) % 40 / 10


def server(stack: ExitStack, form: str) -> Http:
    """A server that answers in a form, in which {0} stands for the grade."""
    chat = FakeChat()
    stack.callback(chat.stop)
    chat.reset(lambda request: Reply(text=form.replace("{0}", f"{grade(request):.3f}")))
    return Http(base_url=chat.url, model="fake")


class Scripted:
    """A judge that answers by a function of the question; what it was asked is kept."""

    def __init__(self, probabilities: Any = None, words: Any = None):
        self.counters, self.probabilities, self.words = Counters(), probabilities, words
        self.family = ""
        self.asked, self.writings = [], []

    def check_options(self, options):
        pass

    def option_logprobs(self, questions, options):
        self.asked += questions
        values = [self.probabilities(q) for q in questions]
        rows = [[v.get(name, 0.0) for name in options] if isinstance(v, dict) else [v, 1 - v] for v in values]
        return torch.tensor(rows, dtype=torch.float64).log()

    def answer_logprobs(self, questions, answer):
        self.asked += questions
        return torch.tensor([self.probabilities(q) for q in questions], dtype=torch.float64).log()

    def write(self, questions, writing):
        self.asked += questions
        self.writings += [writing] * len(questions)
        return [self.words(q) for q in questions]


def grey(*values: int) -> torch.Tensor:
    """Pictures [B, 3, 4, 5] of one brightness each."""
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, 4, 5) / 255


def brightness(question) -> list[int]:
    return [int(image[0, 0, 0]) for image in question.images]
