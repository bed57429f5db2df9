"""Requests to a run under way, as files of its folder: `flowrl ask` writes them, the run takes them up and answers.

    .asks               empty; there while a run holds its folder and takes requests
    requests/ID.json    a request that waits; the folder is there only while one does, so that a look is one stat
    asked/ID.json       a request that was taken up, with its state and the answer

An ID is time, process and word of the request, in that order.
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from flowrl.core.files import is_mapping, known_object, write_atomically, writing

Word = Literal["save", "sample", "evaluate", "stop"]
State = Literal["under way", "done", "failed", "dropped"]
"""State of a request that was taken up; dropped: the run ended before."""

WORDS: tuple[Word, ...] = ("save", "sample", "evaluate", "stop")
TAKES, WAITING, ASKED = ".asks", "requests", "asked"


def who() -> str:
    """The user and the machine of this process."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user without a name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


# ---- the side that asks


def is_open(run: Path) -> bool:
    """Whether the run under way takes requests."""
    return (run / TAKES).is_file()


def submit(run: Path, word: Word, options: Mapping[str, Any]) -> str:
    """Write a request; its ID. Raises WriteError: the folder cannot be written."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}.{rest:09d}-{os.getpid()}-{word}"
    request = {"word": word, "by": who(), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "options": dict(options)}
    file = run / WAITING / f"{name}.json"
    temporary = file.with_name(f".{file.name}.tmp")
    for attempt in (True, True, False):
        with writing(file, "the run is not disturbed"):
            try:
                file.parent.mkdir(exist_ok=True)
                temporary.write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
                os.replace(temporary, file)
                break
            except FileNotFoundError:  # the run has removed the empty folder in between
                if not attempt:
                    raise
    return name


def withdraw(run: Path, name: str) -> bool:
    """Remove a request that nobody has taken up; whether it was there."""
    try:
        (run / WAITING / f"{name}.json").unlink()
    except FileNotFoundError:
        return False
    _remove_if_empty(run)
    return True


def answer_to(run: Path, name: str) -> dict[str, Any] | None:
    """A request that was taken up, with its `state` and, once it is final, its `text`; None: it still waits."""
    return known_object(run / ASKED / f"{name}.json") or None


# ---- the side of the run


def open_desk(run: Path) -> None:
    """Drop the requests that an earlier run left, and take those to come; this one holds the folder's lock."""
    close_desk(run, "the run had ended before it was taken up")
    write_atomically(run / TAKES, "")


def close_desk(run: Path, why: str) -> None:
    """Answer all requests that are left as dropped, and take no more."""
    (run / TAKES).unlink(missing_ok=True)
    for name in (*waiting(run), *under_way(run)):
        take(run, name)
        answer(run, name, "dropped", why)


def someone_waits(run: Path) -> bool:
    """Whether a request may wait; one stat."""
    return (run / WAITING).exists()


def waiting(run: Path) -> list[str]:
    """IDs of the requests that wait, the oldest first."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(file.stem for file in (run / WAITING).iterdir() if file.suffix == ".json" and file.stem[0] != ".")
    return []


def under_way(run: Path) -> list[str]:
    """IDs of the requests that were taken up and have no answer yet."""
    files = sorted((run / ASKED).glob("*.json"))
    return [file.stem for file in files if known_object(file).get("state") == "under way"]


def peek(run: Path, name: str) -> dict[str, Any]:
    """A request that waits, its word a text; {} if it was withdrawn or is damaged."""
    found = known_object(run / WAITING / f"{name}.json")
    return found if isinstance(found.get("word"), str) else {}


def take(run: Path, name: str) -> dict[str, Any] | None:
    """Take a request up: from now on it cannot be withdrawn. None: it was.

    A file that holds no request has the word "", and options that cannot be written again are left out.
    """
    file = run / WAITING / f"{name}.json"
    if not file.is_file():
        return None
    found = known_object(file)
    options = found.get("options")
    try:
        json.dumps(options, indent=1)
    except RecursionError:
        options = None
    request: dict[str, Any] = {key: str(found.get(key, ""))[:200] for key in ("word", "by", "at")}
    request["options"] = options if is_mapping(options) else {}
    _write(run, name, request | {"state": "under way"})
    file.unlink(missing_ok=True)
    _remove_if_empty(run)
    return request


def answer(run: Path, name: str, state: State, text: str, **facts: Any) -> None:
    """Write the answer to a request that was taken up: a sentence, and facts such as paths."""
    known = answer_to(run, name) or {}
    _write(run, name, known | {"state": state, "text": text, "answered": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | facts)


def _write(run: Path, name: str, record: dict[str, Any]) -> None:
    write_atomically(run / ASKED / f"{name}.json", json.dumps(record, indent=1) + "\n")


def _remove_if_empty(run: Path) -> None:
    with suppress(OSError):  # not empty: another request has come, or is being written
        (run / WAITING).rmdir()
