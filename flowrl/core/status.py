"""Status of a run in its folder: running, or how it ended."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from flowrl.core.files import is_mapping

LOCK = ".lock"
SUMMARY = "summary.json"
DIED = "died"


def is_locked(folder: Path) -> bool:
    """Whether a process writes to a run folder: it holds the lock until it ends, in whatever way."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:  # a copy of a run folder
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return True
    finally:
        os.close(descriptor)
    return False


def read(folder: Path) -> dict[str, Any]:
    """`summary.json` with its present status; {} if it is missing or unreadable."""
    try:
        result = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return now(result, folder) if is_mapping(result) else {}


def now(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A summary with its present status: "running" without a lock is a run that died, a lock one that runs again."""
    status = summary.get("status")
    if status == "running" and not is_locked(folder):
        reason = "it was killed, or its machine went down: its status is running, and no process holds its folder"
        return summary | {"status": DIED, "reason": reason}
    if status not in (None, "finished", "running") and is_locked(folder):
        return {k: v for k, v in summary.items() if k != "reason"} | {"status": "running"}
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Sentence about how a run ended before its end, and how it goes on; "" if it runs or has finished."""
    status, reason, command = (summary.get(name) for name in ("status", "reason", "command"))
    if status in (None, "finished", "running"):
        return ""
    text = f"The run {'was ' if status == 'stopped' else ''}{status}" + (f": {reason}." if reason else ".")
    return text + (f" Go on with: {command}" if command else " Go on with --resume." if status == DIED else "")
