"""What a run under way asks people, as files: the samples of a prompt, and its scores once the votes are counted.

    votes/iteration-000003/slot-0002.json           a question: the samples of a prompt, by their images
    votes/iteration-000003/slot-0002.closed.json    its votes were counted: these scores stand, whatever comes later
    votes/images/                                   the images, named by their contents
    votes/.turn                                     locked while votes are counted, added or taken back

The run writes them, `flowrl vote` adds votes (votes.py), and the run closes a question. A run that is resumed asks the
same again: a question with the same images keeps its votes, and its scores where it is closed.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.files import json_ready, parsed, read_object, write_atomically, writing
from flowrl.core.polls import Closed, Question, Vote
from flowrl.data.natural import natural
from flowrl.run.people.votes import LOG, read_votes

ROUND, TURN = "iteration-", ".turn"
_NAME = re.compile(r"(iteration-\d{6,})-(slot-\d{4,})")
_CLOSED = ".closed.json"
_REMEDY = "delete it: a run that is resumed writes it again, and its votes are in votes.jsonl"


def place_of(folder: Path, group: str) -> Path | None:
    """File of a question by its name in the votes; None: it is the name of something else."""
    found = _NAME.fullmatch(group)
    return None if found is None else folder / found[1] / f"{found[2]}.json"


def _file(folder: Path, iteration: int, slot: int, end: str = ".json") -> Path:
    return folder / f"{ROUND}{iteration:06d}" / f"slot-{slot:04d}{end}"


def of_training(group: str) -> bool:
    """Whether a group of the votes is a question of a run under way, not a pair of base and tuned."""
    return _NAME.fullmatch(group) is not None


def is_closed(folder: Path, group: str) -> bool:
    """Whether the votes of a group were counted, so that none is added or taken back any more."""
    file = place_of(folder, group)
    return file is not None and file.with_name(file.stem + _CLOSED).is_file()


@contextlib.contextmanager
def turn(folder: Path) -> Generator[None]:
    """Votes are neither added nor counted by another process inside the block.

    Raises WriteError: the file of the lock cannot be written, or its file system has no locks.
    """
    with writing(folder / TURN, "the votes before it are safe"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / TURN, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with writing(folder / TURN, "the votes before it are safe"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


# ---- the side of the run


def put(folder: Path, question: Question) -> Closed | None:
    """Ask a question; its scores where the same one was closed before.

    Raises WriteError: it could not be written; ConfigError: a file of it is damaged.
    """
    file = _file(folder, question.iteration, question.slot)
    with turn(folder):
        known = closed(folder, question)
        if known is None:
            file.with_name(file.stem + _CLOSED).unlink(missing_ok=True)
            if not file.is_file() or _read(file) != question:
                write_atomically(file, json.dumps(asdict(question), indent=1) + "\n")
    return known


def forget_others(folder: Path, iteration: int) -> None:
    """Take back the open questions of other iterations, which a run that went back in time has left."""
    for question in open_questions(folder):
        if question.iteration != iteration:
            with turn(folder):  # a vote is kept for good, or refused
                _file(folder, question.iteration, question.slot).unlink(missing_ok=True)


def closed(folder: Path, question: Question) -> Closed | None:
    """A question's scores; None while open, or of other images. Raises ConfigError: the file is damaged."""
    file = _file(folder, question.iteration, question.slot, _CLOSED)

    def make(record: Mapping[str, Any]) -> tuple[tuple[str, ...], Closed]:
        scores = tuple(float("nan") if score is None else float(score) for score in record["scores"])
        missing, votes = tuple(map(int, record["missing"])), int(record["votes"])
        return tuple(map(str, record["images"])), Closed(scores=scores, missing=missing, votes=votes)

    images, result = parsed(file, _REMEDY, make) if file.is_file() else ((), None)
    return result if images == question.images else None


def close(folder: Path, question: Question, result: Closed) -> None:
    """Keep a question's scores; the turn must be held. Raises WriteError: not written, and the question is open."""
    file = _file(folder, question.iteration, question.slot, _CLOSED)
    write_atomically(file, json.dumps(json_ready({"images": question.images} | asdict(result)), indent=1) + "\n")


def reopen(folder: Path, iteration: int, slots: Iterable[int]) -> None:
    """Open again those of an iteration's questions that were closed without all of their votes."""
    for slot in sorted(set(slots)):
        file = _file(folder, iteration, slot, _CLOSED)
        with turn(folder):
            if file.is_file() and any(read_object(file, _REMEDY).get("missing", [])):
                file.unlink()


# ---- the side of those who look


def open_questions(folder: Path, iteration: int | None = None) -> list[Question]:
    """The questions that wait for votes, of an iteration or of all, by iteration and slot.

    One that is just being written is left out.
    """
    found: list[Question] = []
    rounds = f"{ROUND}*" if iteration is None else f"{ROUND}{iteration:06d}"
    for file in sorted(folder.glob(f"{rounds}/slot-*.json"), key=lambda f: (natural(f.parent.name), natural(f.name))):
        if file.name.endswith(_CLOSED) or file.with_name(file.stem + _CLOSED).is_file():
            continue
        with contextlib.suppress(ConfigError):
            found.append(_read(file))
    return found


def _read(file: Path) -> Question:
    def make(record: dict[str, Any]) -> Question:
        listed = {"samples": tuple(map(int, record["samples"])), "images": tuple(map(str, record["images"]))}
        listed["sources"] = tuple(map(str, record.get("sources", ())))
        return Question(**record | listed)

    return parsed(file, _REMEDY, make)


class Log:
    """The votes of a folder for a process that only reads them: read again when the file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark: tuple[int, int] | None = None
        self._votes: tuple[Vote, ...] = ()

    def votes(self) -> tuple[Vote, ...]:
        """Those that count. Raises ConfigError: a line is damaged."""
        try:
            known = (self.folder / LOG).stat()
        except FileNotFoundError:  # nobody has voted yet
            return ()
        mark = known.st_mtime_ns, known.st_size
        if mark != self._mark:
            self._votes, self._mark = tuple(read_votes(self.folder)[0].values()), mark
        return self._votes


def lacking(questions: Iterable[Question], votes: Sequence[Vote]) -> dict[str, int]:
    """Group -> votes that it needs at least, each a comparison of two; groups that need none are left out."""
    by_group: dict[str, list[Vote]] = {}
    for vote in votes:
        by_group.setdefault(vote.group, []).append(vote)
    table = {q.group: -(-int(q.missing(by_group.get(q.group, ())).sum()) // 2) for q in questions}
    return {group: count for group, count in table.items() if count}


def in_words(lacking: Mapping[str, int]) -> str:
    """What `lacking` found.

    >>> in_words({"iteration-000001-slot-0000": 3})
    '3 votes missing, on 1 prompt'
    """
    votes, prompts = sum(lacking.values()), len(lacking)
    return f"{votes} vote{'s' * (votes != 1)} missing, on {prompts} prompt{'s' * (prompts != 1)}"
