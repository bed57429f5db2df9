"""The endpoints of a reward server: GET /health, GET /rewards, GET /metrics, POST /score.

A request is refused as early as can be: the token before the body is read, its size while it is read, its images by
their headers before they are decoded. Everything but /health wants the token where there is one.
"""

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import fastapi
from starlette.requests import ClientDisconnect

from flowrl.apps.serving.batching import Batcher
from flowrl.apps.serving.counters import Counters
from flowrl.apps.serving.messages import Limits, Refusal, Request, dumps, parse_request
from flowrl.core.wire import SCHEMA

_REMEMBERED = 1024
"""Answers kept for clients that ask again because they lost the first."""
_RETRY_AFTER_S = "1"


class Service:
    """The work of the endpoints; clients must show `token`, None lets everybody in."""

    def __init__(
        self, batchers: Mapping[str, Batcher], limits: Limits, counters: Counters, token: str | None = None
    ) -> None:
        self.batchers, self.limits, self.counters, self.token = dict(batchers), limits, counters, token
        self.held = 0
        """Bytes of bodies being read."""
        self._answers: OrderedDict[str, tuple[bytes, asyncio.Task[bytes]]] = OrderedDict()
        counters.watch("flowrl_held_bytes", lambda: self.held)

    def require_token(self, header: str | None) -> None:
        """Raise Refusal unless the Authorization header holds the token."""
        if self.token is None:
            return
        shown = (header or "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, f"Bearer {self.token}".encode()):
            raise Refusal(401, "token", "the token is missing or wrong: Authorization: Bearer TOKEN", close=True)

    def health(self) -> tuple[int, bytes]:
        """(status, body): 503 while some reward has no live worker."""
        ready = all(batcher.live for batcher in self.batchers.values())
        rewards = {
            name: {"workers": b.live, "fingerprint": b.about["fingerprint"], "versions": b.about["versions"]}
            for name, b in self.batchers.items()
        }
        message = {"schema": SCHEMA, "status": "ok" if ready else "degraded", "rewards": rewards}
        return (200 if ready else 503), dumps(message)

    def rewards(self) -> bytes:
        """Card and options (so the model) of each; what clients may send."""
        result = {name: batcher.about for name, batcher in self.batchers.items()}
        return dumps({"schema": SCHEMA, "limits": self.limits.as_json(), "rewards": result})

    async def score(self, body: bytes) -> bytes:
        """The answer; the same one again, from memory or from the work going on, for a request that is repeated.

        Raises Refusal: 409 another request has this id, and all that `parse_request` and `Batcher.score` refuse.
        """
        request = parse_request(body, self.limits, self.batchers)
        digest = hashlib.blake2b(body, digest_size=16).digest()
        known, task = self._answers.get(request.request_id, (digest, None))
        if known != digest:
            raise Refusal(409, "repeated", "another request had this request_id; make a new one for each")
        if task is None:
            task = asyncio.create_task(self._score(request))
            self._answers[request.request_id] = digest, task
            if (surplus := len(self._answers) - _REMEMBERED) > 0:  # what is being worked on is kept
                done = [name for name, (_, other) in self._answers.items() if other.done()]
                for name in done[:surplus]:
                    del self._answers[name]
        try:
            # A client that goes away leaves the work to whoever asks again.
            return await asyncio.shield(task)
        except Exception:
            self._answers.pop(request.request_id, None)
            raise

    async def _score(self, request: Request) -> bytes:
        batcher = self.batchers[request.reward]
        results = await batcher.score(request.items)
        rows = [{"id": item.id} | result for item, result in zip(request.items, results, strict=True)]
        head = {"schema": SCHEMA, "request_id": request.request_id, "reward": request.reward}
        return dumps(head | {"fingerprint": batcher.about["fingerprint"], "results": rows})


async def read_body(request: fastapi.Request, service: Service) -> bytes:
    """The body, refused at the byte that is too many.

    Raises Refusal: 413 too large, 408 too slow, 415 no plain JSON, 503 too much is being read already.
    """
    limits, kind = service.limits, request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page in a browser can post anything but this to a server on its user's machine without being asked.
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "type", "send application/json, not compressed", close=True)
    large = Refusal(413, "body", f"the body is larger than {limits.bytes} bytes; send fewer samples", close=True)
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > limits.bytes:  # the parser of HTTP has checked that these are digits
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.bytes:
                    raise large
                if service.held + len(chunk) > limits.held_bytes:
                    raise Refusal(503, "busy", "too many bodies are being read; try again", close=True)
                body += chunk
                service.held += len(chunk)
    except TimeoutError:
        raise Refusal(408, "slow", f"the body did not come within {limits.body_s:g} s", close=True) from None
    finally:
        service.held -= len(body)
    return bytes(body)


def create_app(service: Service) -> fastapi.FastAPI:
    """The ASGI application."""
    counters = service.counters
    # No pages of its own: they would load scripts from elsewhere.
    app = fastapi.FastAPI(title="flowrl rewards", docs_url=None, redoc_url=None, openapi_url=None)

    told: dict[str, Callable[[], tuple[int, bytes]]] = {
        "/health": service.health,
        "/rewards": lambda: (200, service.rewards()),
        "/metrics": lambda: (200, counters.text().encode()),
    }

    async def score(request: fastapi.Request) -> tuple[int, bytes]:
        started = time.perf_counter()
        result = await service.score(await read_body(request, service))
        counters.time(time.perf_counter() - started)
        return 200, result

    def add(path: str, method: str) -> None:
        media = "text/plain; version=0.0.4" if path == "/metrics" else "application/json"

        async def endpoint(request: fastapi.Request) -> fastapi.Response:
            headers = {}
            try:
                if path != "/health":
                    service.require_token(request.headers.get("authorization"))
                status, body = told[path]() if path in told else await score(request)
            except Refusal as refusal:
                counters.add("flowrl_refusals_total", kind=refusal.kind)
                status, body = refusal.status, refusal.body()
                headers |= {"connection": "close"} if refusal.close else {}
                headers |= {"retry-after": _RETRY_AFTER_S} if status in (408, 503) else {}
            except ClientDisconnect:
                status, body = 499, b""  # nobody reads it; the number is nginx's
            counters.add("flowrl_requests_total", endpoint=path, status=str(status))
            return fastapi.Response(body, status, headers, media)

        app.add_api_route(path, endpoint, methods=[method])

    for path in told:
        add(path, "GET")
    add("/score", "POST")
    return app
