"""A server that speaks OpenAI's chat API on 127.0.0.1 and answers as a test says."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image


@dataclass
class Request:
    """What came in."""

    body: dict
    number: int
    """Of all requests, from 0."""
    headers: dict[str, str] = field(default_factory=dict)
    images_as: str = "png"

    @property
    def text(self) -> str:
        """The user's first text."""
        return self.body["messages"][0]["content"][-1]["text"]

    @property
    def images(self) -> list[np.ndarray]:
        urls = [part["image_url"]["url"] for part in self.body["messages"][0]["content"] if part["type"] == "image_url"]
        assert all(url.startswith(f"data:image/{self.images_as};base64,") for url in urls)
        return [np.array(Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1])))) for url in urls]


@dataclass
class Reply:
    """What goes out."""

    text: str = "Yes"
    top: dict[str, float] | None = None
    """First token -> log-probability."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    raw: str | None = None
    """Instead of a chat completion."""

    def json(self) -> dict[str, Any]:
        if self.status != 200:
            return {"error": {"message": self.text, "type": "fake", "code": None}}
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": self.text},
        }
        if self.top is not None:
            listed = [{"token": token, "logprob": value, "bytes": None} for token, value in self.top.items()]
            choice["logprobs"] = {"content": [{**listed[0], "top_logprobs": listed}] if listed else []}
        usage = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
        return {
            **{"id": "x", "object": "chat.completion", "created": 0, "model": "fake"},
            **{"choices": [choice], "usage": usage},
        }


class FakeChat:
    """`answer(request) -> Reply` decides; requests and the most under way at once are kept."""

    def __init__(self) -> None:
        import uvicorn
        from fastapi import FastAPI

        self.reset(lambda request: Reply())
        app = FastAPI()
        app.post("/v1/chat/completions")(self._endpoint())
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def reset(self, answer: Callable[[Request], Reply]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.most_at_once = self._at_once = 0

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def _endpoint(self) -> Any:
        import fastapi
        from fastapi.responses import JSONResponse, Response

        async def complete(http: fastapi.Request) -> Response:
            request = Request(await http.json(), len(self.requests), dict(http.headers))
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            try:
                reply = self.answer(request)
                await asyncio.sleep(reply.delay_s)
            finally:
                self._at_once -= 1
            if reply.raw is not None:
                return Response(reply.raw, reply.status, reply.headers, "application/json")
            return JSONResponse(reply.json(), reply.status, reply.headers)

        # FastAPI looks the annotation up in the module's names.
        complete.__annotations__["http"] = fastapi.Request
        return complete


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
