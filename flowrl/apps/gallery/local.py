"""What the servers of `flowrl watch` and `flowrl vote` share: an address of this machine alone, and answers.

Nothing is answered that is asked for under another name: a page of the network whose name was pointed at this machine
could read it otherwise.
"""

import errno
import gzip
import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from flowrl.core.errors import ConfigError, Remedy

HOST, PORT, TRIED = "127.0.0.1", 8420, 20
"""Address; the first port that is tried where none is given, and how many more are before the system gives one."""
_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine under which a browser may ask, with any port: a tunnel has its own."""
_ZIP_FROM = 1000
"""Bytes from which on a text is compressed: a tunnel is slow."""


class LocalServer(ThreadingHTTPServer):
    """A server at 127.0.0.1 whose port is bound when it is made."""

    daemon_threads = True
    # Another process that listens at the same port must be noticed; http.server allows it elsewhere by default.
    allow_reuse_port = False

    def __init__(self, port: int | None, handler: type[BaseHTTPRequestHandler]) -> None:
        """Bind the port; 0: one that the system gives; None: `PORT` or one of the next free ones.

        Raises ConfigError: a port in use.
        """
        super().__init__((HOST, port or 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = _bound(port)
        self.server_address = self.socket.getsockname()
        self.server_activate()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves before its answer is no error of ours."""


def _bound(port: int | None) -> socket.socket:
    """A socket at the port, or at the first free one of those that are tried."""
    wanted = [port] if port is not None else [*range(PORT, PORT + TRIED), 0]
    for number in wanted:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A port whose last server has just ended is free; one with a living server is refused all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
            return listener
        except OSError as error:
            listener.close()
            if port is None and error.errno == errno.EADDRINUSE:
                continue
            why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or error
            raise ConfigError(f"--port {number}: {why}", Remedy(without="--port")) from None
    raise AssertionError("the system gives a free port")


class LocalHandler(BaseHTTPRequestHandler):
    """Answers to GET and HEAD, by `get`; other methods are refused."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "flowrl", ""
    timeout = 60
    _HEADERS: ClassVar = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    def get(self, path: str, query: str) -> None:
        """Answer a question that came under a name of this machine; the path is unquoted, without its first slash."""
        raise NotImplementedError

    def do_GET(self) -> None:
        if not self.from_here():
            return
        address = urlsplit(self.path)
        self.get(unquote(address.path).removeprefix("/"), address.query)

    def do_HEAD(self) -> None:
        self.do_GET()

    def refuse(self) -> None:
        self.close_connection = True
        self.send_text(405, "This server is read only.", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def from_here(self) -> bool:
        """Whether the question came under a name of this machine; else it is answered with a refusal."""
        host = self.headers.get("Host", "").strip().lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name in _NAMES:
            return True
        self.close_connection = True
        self.send_text(403, "This server answers to 127.0.0.1 and localhost alone. Open the address that it printed.")
        return False

    def send_json(self, value: object, code: int = 200) -> None:
        self.send_data(code, json.dumps(value).encode("utf-8", "replace"), "application/json")

    def send_text(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_data(code, f"{text}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8", headers)

    def send_data(self, code: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        said = {"Cache-Control": "no-store", **self._HEADERS, **(headers or {})}
        if self.close_connection:
            said["Connection"] = "close"
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(data) >= _ZIP_FROM and "image/" not in kind:
            data, said["Content-Encoding"] = gzip.compress(data, 3), "gzip"
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **said}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal shows addresses, not requests."""
