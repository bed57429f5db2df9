"""The server of `flowrl watch`: pages and images of some run folders, for browsers of this machine alone.

It answers GET and HEAD, at 127.0.0.1, and nothing that is asked for under another name: a page of the network whose
name was pointed at this machine could read it otherwise. Of the folders it gives out images, never another file.
"""

from __future__ import annotations

import errno
import gzip
import json
import socket
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from flowrl.core import media
from flowrl.core.errors import ConfigError
from flowrl.gallery import images
from flowrl.gallery.live import LivePage, Served
from flowrl.gallery.watched import Watched, require_run

HOST, PORT, TRIED = "127.0.0.1", 8420, 20
"""Address; the first port that is tried where none is given, and how many more are before the system gives one."""
_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine under which a browser may ask, with any port: a tunnel has its own."""
_SMALLEST_PX, _LARGEST_PX = 16, 4096
_ZIP_FROM = 1000
"""Bytes from which on a text is compressed: a tunnel is slow."""


class Server(ThreadingHTTPServer):
    """A server for some runs: their comparison or the only one at the root, each one at `run/N/`."""

    daemon_threads = True
    # Another process that listens at the same port must be noticed; http.server allows it elsewhere by default.
    allow_reuse_port = False

    def __init__(self, folders: Sequence[Path], port: int | None = None, *, accept_changes: bool = False) -> None:
        """Bind the port and build the first page.

        Args:
            folders: run folders.
            port: port; 0: one that the system gives, None: `PORT` or one of the next free ones.
            accept_changes: show runs that had different contents of a file side by side, without a common chart.

        Raises:
            ConfigError: a folder that is not a run, runs that cannot be compared, or a port in use.
        """
        for folder in folders:
            require_run(folder)
        self.folders = list(folders)
        self.pages = {"": LivePage([Watched(f) for f in folders], Served(folders), accept_changes=accept_changes)}
        if len(folders) > 1:
            for number, folder in enumerate(folders):
                self.pages[f"run/{number}/"] = LivePage([Watched(folder)], Served(folders, "../../"))
        self.pages[""].require()
        super().__init__((HOST, port or 0), Handler, bind_and_activate=False)
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
            raise ConfigError(
                f"--port {number}: {why}; give another one, or leave --port out to take a free one"
            ) from None
    raise AssertionError("the system gives a free port")


class Handler(BaseHTTPRequestHandler):
    """Answers of the server."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "flowrl", ""
    timeout = 60
    _HEADERS: ClassVar = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    @property
    def site(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        if not self._from_here():
            self._text(403, "This server answers to 127.0.0.1 and localhost alone. Open the address that it printed.")
            return
        address = urlsplit(self.path)
        path, query = unquote(address.path).removeprefix("/"), parse_qs(address.query)
        base = next((key for key in sorted(self.site.pages, reverse=True) if key and path.startswith(key)), "")
        page, name = self.site.pages[base], path.removeprefix(base)
        if name == "":
            self._send(200, page.page().encode("utf-8", "replace"), "text/html; charset=utf-8")
        elif name == "state":
            self._json(page.state())
        elif name == "parts":
            self._json(page.changes(query.get("have", [""])[0]))
        elif path.startswith("files/"):
            self._image(path.removeprefix("files/"), query)
        else:
            self._text(404, "There is no such page.")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _refuse(self) -> None:
        self.close_connection = True
        self._text(405, "This server is read only.", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _from_here(self) -> bool:
        host = self.headers.get("Host", "").strip().lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in _NAMES

    def _image(self, address: str, query: dict[str, list[str]]) -> None:
        file = image_file(self.site.folders, address)
        if file is None:
            self._text(404, "There is no such image.")
            return
        try:
            if "px" in query:
                limit, cells = (int(query.get(key, ["1"])[0]) for key in ("px", "cells"))
                limit, cells = min(max(limit, _SMALLEST_PX), _LARGEST_PX), min(max(cells, 1), 64)
                made = images.encoded(file, limit, cells=cells)
                data, kind = made.data, made.kind
            else:
                data, kind = file.read_bytes(), file.suffix[1:]
        except (ConfigError, OSError, ValueError):
            self._text(404, "The image cannot be read.")
            return
        # The address has the time of the file, so that a new file is a new image.
        keep = "private, max-age=86400, immutable" if "v" in query else "no-cache"
        self._send(200, data, f"image/{kind}", {"Cache-Control": keep, "Content-Security-Policy": "default-src 'none'"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode("utf-8", "replace"), "application/json")

    def _text(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self._send(code, f"{text}\n".encode(), "text/plain; charset=utf-8", headers)

    def _send(self, code: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        said = {"Cache-Control": "no-store", **self._HEADERS, **(headers or {})}
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(data) >= _ZIP_FROM and "image/" not in kind:
            data, said["Content-Encoding"] = gzip.compress(data, 3), "gzip"
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **said}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal of `flowrl watch` shows addresses, not requests."""


def image_file(folders: Sequence[Path], address: str) -> Path | None:
    """The image of a run at `NUMBER/path`; None: no image, or not inside the folder of that run."""
    number, _, rest = address.partition("/")
    if not number.isdecimal() or int(number) >= len(folders) or "\0" in rest:
        return None
    try:
        root = folders[int(number)].resolve(strict=True)
        file = (root / rest).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # not there, or a circle of links
        return None
    return file if file.is_relative_to(root) and file.is_file() and file.suffix in media.SUFFIXES else None
