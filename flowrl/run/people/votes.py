"""Votes of people on two samples of a prompt, as files: a log that only grows, and the preference pairs in it.

    votes.jsonl      one line an event, a vote or the undoing of one
    pairs.jsonl      the decided votes as preference data (docs/preferences.md), made from the log
    strengths.jsonl  the same of all votes on two images together, ties among them, with a margin
    images/          the images, named by their contents

One process writes a folder: it holds the lock of `VoteBook`. A last line that a kill cut off is dropped.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.core.files import fsync, loads, replaced, write_atomically, writing
from flowrl.core.polls import Vote, wins_among
from flowrl.statistics.bradley_terry import strengths

FOLDER = "votes"
"""Folder of the votes in that of a run."""
LOG, PAIRS, STRENGTHS, LOCK = "votes.jsonl", "pairs.jsonl", "strengths.jsonl", ".lock"
IMAGES = "images"
"""Folder of the images that were voted on, named by their contents."""


def image_name(data: bytes, suffix: str) -> str:
    """Name of an image in a folder of votes, by its contents."""
    return f"{IMAGES}/{hashlib.sha256(data).hexdigest()[:24]}{suffix}"


def keep_image(folder: Path, data: bytes, suffix: str) -> str:
    """Write a new image whole; its name. Raises WriteError: it could not be written."""
    name = image_name(data, suffix)
    copy = folder / name
    if not copy.is_file():
        with replaced(copy, "the votes before it are safe") as half:
            half.write_bytes(data)
    return name


def keep_file(folder: Path, file: Path | str) -> str:
    """`keep_image` of a file. Raises OSError: it cannot be read."""
    return keep_image(folder, Path(file).read_bytes(), Path(file).suffix)


def source_column(sources: Sequence[str]) -> dict[str, Any]:
    """What a record of pairs has of the images that its prompt edits, for data.pairs.records.source=source."""
    return {"source": sources[0] if len(sources) == 1 else list(sources)} if sources else {}


def read_votes(folder: Path) -> tuple[dict[int, Vote], int]:
    """(the votes that count, by number, in their order; the bytes of whole lines).

    Raises ConfigError: a line is damaged, other than a last one that was cut off.
    """
    file = folder / LOG
    data = file.read_bytes() if file.is_file() else b""
    whole = data.rfind(b"\n") + 1
    votes: dict[int, Vote] = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            event = loads(line)
            if "undone" in event:
                del votes[event["undone"]]
            else:
                told = {key: str(event[key]) for key in Vote.__dataclass_fields__ if key != "sources"}
                votes[number] = Vote(**told, sources=tuple(event.get("sources", ())))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}:{number} is damaged ({type(error).__name__}: {error}); restore the file from a copy, or "
                "move it away: then no vote of it counts, and voting begins anew"
            ) from None
    return votes, whole


def strength_records(votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """A record for every two images that the votes of one group compare, the stronger chosen.

    Its margin is the difference of their Bradley-Terry strengths, so that sigmoid(margin) is the chance that it is
    preferred; 0 in a tie. Skipped votes count for nothing.
    """
    decided = [vote for vote in votes if vote.choice != "skip"]
    names = list(dict.fromkeys(image for vote in decided for image in (vote.first, vote.second)))
    wins = wins_among(names, decided)
    found, result = strengths(wins), list[dict[str, Any]]()
    for i, j in np.argwhere(np.triu(wins + wins.T)).tolist():
        won, lost = (i, j) if found[i] >= found[j] else (j, i)
        record = {"prompt": decided[0].prompt, "chosen": names[won], "rejected": names[lost]}
        record |= source_column(decided[0].sources)
        counted = {"votes": int(wins[i, j] + wins[j, i]), "group": decided[0].group}
        result.append(record | {"margin": float(found[won] - found[lost])} | counted)
    return result


class VoteBook(AbstractContextManager["VoteBook"]):
    """The votes of a folder, written by this process alone; a context that frees the folder, which is made
    if it is missing; `place` says where this process is found, in the message to a second one.

    Raises ConfigError: another process writes there, or the log is damaged.
    """

    def __init__(self, folder: Path, place: str) -> None:
        self.folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(place)
            self.votes, whole = read_votes(folder)
            with writing(folder / LOG), (folder / LOG).open("ab") as log:
                log.truncate(whole)
            self._lines = (folder / LOG).read_bytes().count(b"\n")
            self._strengths: dict[str, str] = {}
            self._write_pairs(*dict.fromkeys(vote.group for vote in self.votes.values()))
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, place: str) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._lock, 1000, 0).decode("utf-8", "replace") or "another process"
            raise ConfigError(
                f"{self.folder} takes votes already, at {other}: "
                "open that page, several people may vote there, or end it"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, place.encode(), 0)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    def add(self, vote: Vote) -> int:
        """Keep a vote on the disk; its number. Raises WriteError: it could not be written, and does not count."""
        number = self._append(asdict(vote))
        self.votes[number] = vote
        self._write_pairs(vote.group)
        return number

    def undo(self, voter: str) -> Vote | None:
        """Take back the last vote of a voter that counts, and return it; None: there is none."""
        number = self._last(voter)
        if number is None:
            return None
        self._append({"undone": number, "voter": voter})
        vote = self.votes.pop(number)
        self._write_pairs(vote.group)
        return vote

    def last(self, voter: str) -> Vote | None:
        """The last vote of a voter that counts, which `undo` takes back; None: there is none."""
        number = self._last(voter)
        return None if number is None else self.votes[number]

    def _last(self, voter: str) -> int | None:
        return next((n for n, vote in reversed(self.votes.items()) if vote.voter == voter), None)

    def _append(self, event: dict[str, Any]) -> int:
        rest = (json.dumps(event | {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n").encode()
        with writing(self.folder / LOG, "the votes before it are safe"):
            with (self.folder / LOG).open("ab", buffering=0) as log:
                size = log.tell()
                try:
                    while rest:
                        rest = rest[log.write(rest) :]
                except BaseException:  # a full disk, after a part of the line
                    log.truncate(size)
                    raise
            fsync(self.folder / LOG)
        self._lines += 1
        return self._lines

    def _write_pairs(self, *changed: str) -> None:
        """Write the preference data anew; the votes of the groups `changed` are others than before."""
        by_group: dict[str, list[Vote]] = {group: [] for group in changed}
        for vote in self.votes.values():
            if vote.group in by_group:
                by_group[vote.group].append(vote)
        for group, votes in by_group.items():
            self._strengths[group] = "".join(json.dumps(each) + "\n" for each in strength_records(votes))
        text = ""
        for vote in self.votes.values():
            if vote.choice in ("first", "second"):
                images = (vote.first, vote.second) if vote.choice == "first" else (vote.second, vote.first)
                record = {"prompt": vote.prompt, "chosen": images[0], "rejected": images[1]}
                record |= source_column(vote.sources)
                text += json.dumps(record | {"voter": vote.voter, "group": vote.group}) + "\n"
        write_atomically(self.folder / PAIRS, text)
        write_atomically(self.folder / STRENGTHS, "".join(self._strengths.values()))
