"""A worker whose launcher is gone ends itself. Imports next to nothing: the watch begins before torch is loaded."""

from __future__ import annotations

import os
import threading
import time

PARENT = "FLOWRL_PARENT"
"""Process id of the launcher, in a worker's environment."""


def watch_parent(parent: int, interval_s: float = 0.2) -> None:
    """End this process when its launcher is gone, even by kill -9, and even before this is called."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def watch_launcher() -> None:
    """The same where a launcher has started this process."""
    if PARENT in os.environ:
        watch_parent(int(os.environ[PARENT]))
