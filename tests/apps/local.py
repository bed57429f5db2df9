"""A server of `flowrl watch` or `flowrl vote` in a thread of the test, and questions to it."""

import http.client
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from flowrl.apps.gallery.local import HOST, LocalServer

S = TypeVar("S", bound=LocalServer)


@contextmanager
def served(server: S) -> Generator[S]:
    """The server while it answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: LocalServer, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, bytes, Any]:
    """(status, body, headers) for a path as it is, which urllib would not send."""
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()
