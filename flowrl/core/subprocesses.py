"""Watch of a worker over its launcher. It imports little, since it begins before torch is loaded."""

from __future__ import annotations

import os
import threading
import time

PARENT = "FLOWRL_PARENT"
"""Environment variable of a worker: process id of its launcher."""


def watch_parent(parent: int, interval_s: float = 0.2) -> None:
    """End this process when its launcher has ended, even by kill -9 or before this call."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def watch_launcher() -> None:
    """Watch the launcher if one has started this process."""
    if PARENT in os.environ:
        watch_parent(int(os.environ[PARENT]))
