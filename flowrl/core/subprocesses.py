"""Watch of a worker over its launcher, and how long it waits for the others. It imports little, since it begins before
torch is loaded."""

import os
import threading
import time

PARENT = "FLOWRL_PARENT"
"""Environment variable of a worker: process id of its launcher."""
PATIENCE_S = 6 * 3600.0
"""Seconds that processes wait for each other. torch's default between GPUs is 600 and ends a healthy run: a reward on a
server may retry for 900, and a slow judge or the first process's files take as long. A process that has ended is
noticed at once, by its closed connections and by its launcher, and not by this."""


def require_patience(name: str, seconds: float) -> None:
    """Raise ValueError for work that other processes might not wait for; several calls of it may follow each other."""
    if seconds > PATIENCE_S / 4:
        raise ValueError(
            f"{name}={seconds:g} is too long: other processes wait {PATIENCE_S:g} s for all of an iteration's scores; "
            f"give at most {PATIENCE_S / 4:g}"
        )


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
