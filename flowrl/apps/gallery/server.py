"""The server of `flowrl watch`: pages and images of some run folders, for browsers of this machine alone.

It answers GET and HEAD (flowrl/apps/gallery/local.py). Of the folders it gives out images, never another file.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs

from flowrl.apps.gallery import images
from flowrl.apps.gallery.live import LivePage, Served
from flowrl.apps.gallery.local import LocalHandler, LocalServer
from flowrl.apps.gallery.watched import Watched, require_run
from flowrl.core.errors import ConfigError
from flowrl.media import media

_SMALLEST_PX, _LARGEST_PX = 16, 4096
_FAMILY = {"mp4": "video"}
"""First part of the media type of a kind of file, where it is not "image"."""


class Server(LocalServer):
    """A server for some runs: their comparison or the only one at the root, each one at `run/N/`."""

    def __init__(self, folders: Sequence[Path], port: int | None = None, *, accept_changes: bool = False) -> None:
        """Bind the port and build the first page. `port` 0: one that the system gives; None: 8420 or one of the next
        free ones. `accept_changes`: show runs that had different contents of a file side by side, without a common
        chart.

        Raises ConfigError: a folder that is not a run, runs that cannot be compared, or a port in use.
        """
        for folder in folders:
            require_run(folder)
        self.folders = list(folders)
        self.pages = {"": LivePage([Watched(f) for f in folders], Served(folders), accept_changes=accept_changes)}
        if len(folders) > 1:
            for number, folder in enumerate(folders):
                self.pages[f"run/{number}/"] = LivePage([Watched(folder)], Served(folders, "../../"))
        self.pages[""].require()
        super().__init__(port, Handler)


class Handler(LocalHandler):
    """Answers of the server."""

    @property
    def site(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def get(self, path: str, query: str) -> None:
        asked = parse_qs(query)
        base = next((key for key in sorted(self.site.pages, reverse=True) if key and path.startswith(key)), "")
        page, name = self.site.pages[base], path.removeprefix(base)
        if name == "":
            self.send_data(200, page.page().encode("utf-8", "replace"), "text/html; charset=utf-8")
        elif name == "state":
            self.send_json(page.state())
        elif name == "parts":
            self.send_json(page.changes(asked.get("have", [""])[0]))
        elif path.startswith("files/"):
            self._image(path.removeprefix("files/"), asked)
        else:
            self.send_text(404, "There is no such page.")

    def _image(self, address: str, query: dict[str, list[str]]) -> None:
        file = image_file(self.site.folders, address)
        if file is None:
            self.send_text(404, "There is no such image.")
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
            self.send_text(404, "The image cannot be read.")
            return
        # The address has the time of the file, so that a new file is a new image.
        keep = "private, max-age=86400, immutable" if "v" in query else "no-cache"
        self.send_data(
            200,
            data,
            f"{_FAMILY.get(kind, 'image')}/{kind}",
            {"Cache-Control": keep, "Content-Security-Policy": "default-src 'none'"},
        )


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
