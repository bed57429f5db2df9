"""Status of a run in its folder: running, or how it ended."""

import fcntl
import os
from pathlib import Path
from typing import Any

from flowrl.core.files import known_object

LOCK = ".lock"
SUMMARY = "summary.json"
DIED = "died"
GUARDED = "guarded"
"""Ended by its guard, with everything that a finished run has."""
ENDED = ("finished", GUARDED)
"""Statuses of a run that has its final evaluation."""


def is_locked(folder: Path) -> bool:
    """Whether a process writes to a run folder: it holds the lock until it ends, in whatever way."""
    return asked_lock(folder) is not False


def asked_lock(folder: Path) -> bool | None:
    """Whether a run folder is locked; None: its file system does not say."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:  # a copy of a run folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False


def read(folder: Path) -> dict[str, Any]:
    """`summary.json` with its present status; {} if it is missing or unreadable."""
    return now(known_object(folder / SUMMARY), folder)


def now(summary: dict[str, Any], folder: Path, alive: bool | None = None) -> dict[str, Any]:
    """A summary with its present status: "running" without a lock is a run that died, a lock one that runs again. The
    summary is that of `summary.json`. `alive`: whether a process writes to the folder; None: whether it is locked.
    """
    status = summary.get("status")
    if status == "running" and not (is_locked(folder) if alive is None else alive):
        reason = "it was killed, or its machine went down: its status is running, and no process holds its folder"
        return summary | {"status": DIED, "reason": reason}
    if status not in (None, "running", *ENDED) and (is_locked(folder) if alive is None else alive):
        return {k: v for k, v in summary.items() if k != "reason"} | {"status": "running"}
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Sentence about how a run ended before its end, and how it goes on; "" if it runs or has finished."""
    status, reason, command = (summary.get(name) for name in ("status", "reason", "command"))
    if status in (None, "running", *ENDED):
        return ""
    text = f"The run {'was ' if status == 'stopped' else ''}{status}" + (f": {reason}." if reason else ".")
    return text + (f" Go on with: {command}" if command else " Go on with --resume." if status == DIED else "")
