"""What a run folder says of its run: whether it goes on, and if not, how it ended."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

LOCK = ".lock"
SUMMARY = "summary.json"
DIED = "died"


def is_locked(folder: Path) -> bool:
    """Whether a process is writing to a run folder: it holds the lock until it has ended, however it ends."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:  # a copy, perhaps of a folder that is in use elsewhere
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks, where nothing is known
        return True
    finally:
        os.close(descriptor)
    return False


def read(folder: Path) -> dict[str, Any]:
    """`summary.json`, with the status that holds now; {} where there is none, or none that can be read."""
    try:
        result = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return now(result, folder) if isinstance(result, dict) else {}


def now(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A summary as it holds now: a run of which nobody holds the folder has died, and one that goes on again runs."""
    status = summary.get("status")
    if status == "running" and not is_locked(folder):
        reason = "it was killed, or its machine went down: it says that it runs, and no process holds its folder"
        return summary | {"status": DIED, "reason": reason}
    if status not in (None, "finished", "running") and is_locked(folder):
        return {k: v for k, v in summary.items() if k != "reason"} | {"status": "running"}
    return summary


def describe(summary: dict[str, Any]) -> str:
    """In a sentence how a run ended that has not finished, and how it goes on; empty where it runs or has finished."""
    status, reason, command = (summary.get(name) for name in ("status", "reason", "command"))
    if status in (None, "finished", "running"):
        return ""
    text = f"The run {'was ' if status == 'stopped' else ''}{status}" + (f": {reason}." if reason else ".")
    return text + (f" Go on with: {command}" if command else " Go on with --resume." if status == DIED else "")
