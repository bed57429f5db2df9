"""The live page: the report of run folders as they are now, in parts, so that a browser fetches only what changed."""

import functools
import hashlib
import html
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from flowrl.apps.gallery import images
from flowrl.apps.gallery.builder import render
from flowrl.apps.gallery.runs import Run, load_run, number
from flowrl.apps.gallery.watched import Watched
from flowrl.core.errors import ConfigError
from flowrl.data.contents import require_comparable
from flowrl.media import media

EVERY_S = 2.0
"""Seconds between two questions of a page."""
SHARE = 20
"""A page is built again at the earliest after so many times the seconds that it took."""
_KEPT = 8
"""Versions of a page whose parts are remembered, for the browsers that still show them."""
_PART = re.compile(r'<(section|header|footer) id="([^"]+)">.*?</\1>', re.DOTALL)
_FRAME = ""
"""Key of what stands between the parts, such as which metric a group of them is about."""
_MAIN = re.compile(r"<main>.*</main>", re.DOTALL)
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


@dataclass(frozen=True)
class Served:
    """A page of a server: it asks for each image when it comes into view."""

    folders: Sequence[Path]
    """Folders of all runs of the server; a run's number is its place."""
    up: str = ""
    """Relative address of the server's first page."""

    def image(self, path: Path | None, limit_px: int, *, cells: int = 1, quality: int = 82) -> dict[str, Any] | None:
        place = next((i for i, folder in enumerate(self.folders) if path and path.is_relative_to(folder)), None)
        if path is None or place is None:
            return None
        found = f"{self.up}files/{place}/{quote(path.relative_to(self.folders[place]).as_posix())}"
        try:
            mark = path.stat().st_mtime_ns
            size, reel = _shape(path, mark)
        except ConfigError:  # the page names the missing package
            raise
        except media.UNREADABLE:  # half written, or gone: the next look finds it
            return None
        video = path.suffix != ".png"
        reel = reel if cells == 1 else None
        limit = min(limit_px, images.VIDEO_PX) if reel else limit_px
        scale = min(1.0, limit / max(size))
        asked = {"v": f"{mark:x}"} | ({} if scale == 1 and not video else {"px": limit_px, "cells": cells})
        width, height = (max(1, round(side * scale)) for side in size)
        link, pixelated = None if scale == 1 and not video else found, max(size) < media.SMALL_PX * cells
        source = f"{found}?{urlencode(asked)}"
        return images.image_values(source, width, height, pixelated=pixelated, reel=reel, link=link)

    def own_page(self, run: Run, number: int) -> str:
        return f"{self.up}run/{number}/"


@functools.lru_cache(maxsize=4096)
def _shape(path: Path, mark: int) -> tuple[tuple[int, int], images.Reel | None]:
    """((width, height), frames of a video) of a file as it was at the time `mark`.

    Raises UNREADABLE of media/media.py; ConfigError (a ValueError): a file that needs the extra `video`, which is not
    installed.
    """
    (frames, fps), size = media.facts(path), media.size(path)
    return size, None if fps is None else images.Reel.of(frames, fps, size)


@dataclass(frozen=True)
class Built:
    """A page as it was built once."""

    version: str
    page: str
    parts: dict[str, str]
    """Id -> element, in the order of the page."""
    took_s: float


class LivePage:
    """One address of the server: a run, or several that are compared."""

    def __init__(self, runs: Sequence[Watched], place: Served, *, accept_changes: bool = False) -> None:
        self.runs, self.place, self.accept_changes = runs, place, accept_changes
        self._lock = threading.Lock()
        self._built: Built | None = None
        self._at = 0.0
        self._problem = ""
        self._older: dict[str, dict[str, str]] = {}
        """Version -> hash of each part, and of what stands between them."""

    def state(self) -> dict[str, Any]:
        """What a page asks for every few seconds: calls of stat, and the lines that were added to `metrics.jsonl`."""
        with self._lock:
            self._look()
            runs = [run.state() for run in self.runs]
            words = [run["state"] for run in runs]
            counted = [f"{words.count(word)} {word}" for word in ("live", "died", "ended", "gone") if word in words]
            return {
                "version": self._version(),
                "problem": self._problem,
                "state": next(word for word in ("died", "gone", "live", "ended") if word in words),
                "text": f"{len(runs)} runs: {', '.join(counted)}.",
                "over": "live" not in words,
                "runs": runs,
            }

    def page(self) -> str:
        """The whole page as the folders are now; of folders that cannot be read, the last one that was built."""
        with self._lock:
            self._look()
            return self._build().page

    def changes(self, have: str) -> dict[str, Any]:
        """The parts that differ from version `have`, or all of `main` where that is another page."""
        with self._lock:
            self._look()
            known, built = self._older.get(have), self._built
            if built is None or time.monotonic() - self._at >= SHARE * built.took_s:
                built = self._build()
            title = _TITLE.search(built.page)
            result: dict[str, Any] = {
                "version": built.version,
                "took_s": round(built.took_s, 3),
                "title": html.unescape(title[1]) if title else "",
            }
            hashes = self._older[built.version]
            if known is None or list(known) != list(hashes) or known[_FRAME] != hashes[_FRAME]:
                main = _MAIN.search(built.page)
                return result | {"main": main[0] if main else ""}
            return result | {"parts": {id_: text for id_, text in built.parts.items() if hashes[id_] != known[id_]}}

    def require(self) -> None:
        """Build the page once, before anybody asks. Raises ConfigError: a damaged file, or runs that do not compare."""
        with self._lock:
            self._look()
            self._build(strict=True)

    def _look(self) -> None:
        for run in self.runs:
            run.look()

    def _version(self) -> str:
        return hashlib.sha256(repr([run.version for run in self.runs]).encode()).hexdigest()[:16]

    def _build(self, *, strict: bool = False) -> Built:
        version, built = self._version(), self._built
        if built is not None and built.version == version:
            return built
        start, live = time.perf_counter(), {"version": version, "every_s": EVERY_S}
        try:
            runs = [load_run(w.folder, lambda _, w=w: w.reader.read(), tolerant=True, alive=w.alive) for w in self.runs]
            for watched, run in zip(self.runs, runs, strict=True):
                watched.name, watched.planned = run.name, number(run.config.get("iterations"))
            changed = require_comparable([run.folder for run in runs], accept=self.accept_changes)
            page, self._problem = render(runs, self.place, alike=not changed, live=live), ""
        except (ConfigError, OSError) as error:
            if strict:
                raise
            self._problem = str(error)
            page = render((), self.place, alike=True, live=live) if built is None else built.page
        parts = {found[2]: found[0] for found in _PART.finditer(page)}
        self._at = time.monotonic()
        self._built = Built(version, page, parts, time.perf_counter() - start)
        main = _MAIN.search(page)
        frame = {_FRAME: _PART.sub("", main[0] if main else "")}
        self._older[version] = {
            id_: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() for id_, text in (frame | parts).items()
        }
        while len(self._older) > _KEPT:
            self._older.pop(next(iter(self._older)))
        return self._built
