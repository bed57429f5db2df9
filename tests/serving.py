"""A reward server in a thread of the test, and a scripted one that answers what a test wants."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from flowrl.apps.serving.app import Service
from flowrl.apps.serving.batching import Batcher
from flowrl.apps.serving.counters import Counters
from flowrl.apps.serving.frames import Result
from flowrl.apps.serving.listener import bind, run
from flowrl.apps.serving.messages import Item, Limits
from flowrl.apps.serving.process import Runner, WorkerFailed
from flowrl.apps.serving.worker import score_items
from flowrl.core.wire import SCHEMA, fingerprint, plain_card, write_image
from flowrl.media.transport import pack
from flowrl.reward import Card, Reward
from flowrl.scoring.weighted import WeightedReward

PIXELS = 6


def pictures(count: int) -> torch.Tensor:
    """[count, 3, 6, 6]; picture k is all k / 255, so that 8 bits hold it exactly."""
    return (torch.arange(count) / 255).reshape(-1, 1, 1, 1).expand(count, 3, PIXELS, PIXELS)


def brightness(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> torch.Tensor:
    """A whole number from the brightness, the number in the prompt and metadata["k"]: which belong together shows."""
    told = [256 * int(p) + 65536 * m.get("k", 0) for p, m in zip(prompts, metadata, strict=True)]
    return torch.stack([(255 * image.mean()).round() for image in images]) + torch.tensor(told)


class Inline:
    """A `Runner` in this process: what a worker does, without the process."""

    def __init__(self, score: Callable = brightness, card: Card | None = None) -> None:
        self.entry = WeightedReward("mine", Reward(score, card or Card(outputs=("mine",))))
        self.batches: list[int] = []

    async def start(self) -> dict[str, Any]:
        card = plain_card(self.entry.reward.card)
        return {"card": card, "fingerprint": fingerprint(card), "options": None, "versions": {"flowrl": "here"}}

    async def run(self, items: Sequence[Item]) -> list[Result]:
        self.batches.append(len(items))
        return score_items(self.entry, list(items))

    async def close(self) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def serving(
    *runners: Runner, limits: Limits | None = None, token: str | None = None, name: str = "mine", **batching: Any
) -> Iterator[str]:
    """Address of a server with these workers of one reward, in a thread."""
    limits, counters, started = limits or Limits(), Counters(), threading.Event()
    batching = {"max_wait_s": 0.0} | batching
    found: dict[str, Any] = {}

    def ready(server: Any) -> None:
        found["stop"] = lambda: setattr(server, "should_exit", True)
        started.set()

    async def main() -> None:
        try:
            batcher = Batcher(name, runners, limits, counters, **batching)
            await run(Service({name: batcher}, limits, counters, token), sock, grace_s=1.0, ready=ready)
        except WorkerFailed as error:
            found["error"] = error
            started.set()

    sock = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(300), "the server did not start"
    if "error" in found:
        raise found["error"]
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        found["stop"]()
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"


def message(count: int = 1, request_id: str = "a", **changes: Any) -> dict[str, Any]:
    """A request for `brightness`, the sample's number in its prompt."""
    items = [
        {
            "id": f"item-{k}",
            "prompt": str(k),
            "metadata": {},
            "image": write_image(pack(picture, "png")),
        }
        for k, picture in enumerate(pictures(count))
    ]
    return {"schema": SCHEMA, "request_id": request_id, "reward": "mine", "items": items} | changes


@contextmanager
def scripted(answer: Callable[[dict[str, Any]], tuple[int, Any]], path: str = "/score", **card: Any) -> Iterator[str]:
    """Address of a server whose `path` is `answer(message) -> (status, body)`; None as body drops the connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None: ...

        def do_GET(self) -> None:
            plain = plain_card(Card(**{"outputs": ("mine",), **card}))
            limits = {"items": 64, "bytes": 10**8, "pixels": 10**8}
            reward = {"fingerprint": "same", "card": plain}
            self._send(200, {"schema": SCHEMA, "limits": limits, "rewards": {"mine": reward}})

        def do_POST(self) -> None:
            assert self.path == path
            status, body = answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if body is None:
                self.close_connection = True
                return
            self._send(status, body)

        def _send(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def results(asked: dict[str, Any], value: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A right answer with the value of each item."""
    rows = [{"id": item["id"], "scores": {"mine": value(item)}, "error": None} for item in asked["items"]]
    head = {"schema": SCHEMA, "request_id": asked["request_id"], "reward": "mine", "fingerprint": "same"}
    return head | {"results": rows}
