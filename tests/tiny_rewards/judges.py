"""What the tiny judges share: a random LLaVA here, and a server whose grades follow the brightness of the image."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

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
