"""The server itself: a socket, deadlines of connections, workers before the first request, signals."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.apps.serving.app import Service, create_app
from flowrl.apps.serving.batching import Batcher

KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that rests, so that it is they who close it."""
_BACKLOG = 1024


class Connection(H11Protocol):
    """Uvicorn waits for ever for the head of a request; this ends the connection after `head_s`."""

    head_s = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._in_request():
            self._deadline = self.loop.call_later(self.head_s, self.transport.abort)
        super().data_received(data)
        if self._in_request():
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet: who connects before the rewards are ready is refused, to try again.

    Raises OSError: the address is taken, or not this machine's.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    result = socket.socket(family, kind, proto)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind(address)
    except OSError:
        result.close()
        raise
    return result


def uvicorn_server(service: Service, *, grace_s: float) -> Server:
    """With connections and requests bounded; it finishes what it has for `grace_s` when it is to end."""
    limits = service.limits
    protocol = type("Connection", (Connection,), {"head_s": limits.head_s})
    options: dict[str, Any] = {
        "http": protocol,
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "off",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "limit_concurrency": limits.connections,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": grace_s,
        "backlog": _BACKLOG,
    }
    return Server(Config(create_app(service), **options))


async def run(
    service: Service,
    sock: socket.socket,
    *,
    grace_s: float = 30.0,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Start the workers, serve until a signal or `should_exit`, finish what was begun, end the workers.

    Raises WorkerFailed: a reward cannot be built.
    """
    batchers: Mapping[str, Batcher] = service.batchers
    async with contextlib.AsyncExitStack() as stack:
        for batcher in batchers.values():
            stack.push_async_callback(batcher.close)
        await asyncio.gather(*(batcher.start() for batcher in batchers.values()))
        server = uvicorn_server(service, grace_s=grace_s)
        sock.listen(_BACKLOG)
        ready(server)
        await server.serve(sockets=[sock])
