"""What a preference set is made of: pictures not opened yet, pairs of them, and a report of what was left out."""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.core.media import open_image
from flowrl.data.prompts import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

TIE, SAME, NO_LABEL = "tie", "same picture twice", "no label"
NO_RECORD, NO_CAPTION, NO_IMAGE = "not a record", "no caption", "missing picture"
NO_REJECTED, BAD_LABEL, BAD_MARGIN = "no rejected picture", "label not 0, 0.5 or 1", "margin not a number from 0"
BY_RULE = (TIE, SAME, NO_LABEL)
"""Pairs without a preference: nothing is wrong with them, and there may be any number."""
EXAMPLES = 3
"""Kept of each reason."""


class Unreadable(Exception):
    """A picture or its row cannot be read; `where` names the file or row, `reason` says what is wrong."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where} cannot be read: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One picture of a set, not opened yet."""

    source: Path | bytes | None
    """A file, or what a file would hold; None: the row has none."""
    where: str
    """For messages."""
    uid: str | None = None
    """Its name in the set, where the set gives one."""

    @property
    def key(self) -> str:
        """Who it is, whichever pairs it stands in: the set's own name for it, its path, or the hash of its bytes."""
        if self.uid is not None or self.source is None:
            return f"uid:{self.uid}"
        if isinstance(self.source, Path):
            return f"file:{self.source}"
        return f"sha256:{hashlib.sha256(self.source).hexdigest()}"

    def open(self) -> Image:
        """See `open_image`.

        Raises:
            Unreadable: there is none, it is broken, or its range is not known.
        """
        if not self.source:
            raise Unreadable(self.where, "there are no bytes")
        try:
            return open_image(io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source)
        except MemoryError:
            raise
        # Decoders raise what they happen to meet in broken bytes: OSError, SyntaxError, ValueError, struct.error, ...
        except Exception as error:
            raise Unreadable(self.where, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt, the picture that is preferred, and the one that is not."""

    prompt: Prompt
    """Everything else of the record is its metadata."""
    chosen: StoredImage
    rejected: StoredImage | None
    """None: the record has a winner only."""
    margin: float | None
    """By how much a reward preferred it, above 0, where the set says."""
    key: str
    """Of the record, unique in the set."""


def is_false(value: Any) -> bool:
    """Whether a flag is false, in whatever way a table or a text file writes it.

    >>> [is_false(value) for value in (False, 0, None, "0", "False", True, 1, "true")]
    [True, True, True, True, True, False, False, False]
    """
    return not value or (isinstance(value, str) and value.strip().lower() in ("", "0", "0.0", "false", "no"))


class Votes:
    """Which pairs under one caption a set judges more than once, by 8 bytes a record."""

    def __init__(self) -> None:
        self.marks = array("Q")
        """Hash of caption and pair, its last bit which of the two is preferred; 0: not known."""

    def add(self, preference: Preference) -> None:
        """Of pictures that a path or a name tells apart; no bytes are read for it."""
        images = [image for image in (preference.chosen, preference.rejected) if image is not None]
        if len(images) < 2 or any(one.uid is None and not isinstance(one.source, Path) for one in images):
            self.marks.append(0)
            return
        won, lost = (image.key for image in images)
        text = "\0".join((preference.prompt.text, *sorted((won, lost))))
        mark = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self.marks.append(int.from_bytes(mark, "big") & ~1 | (won < lost))

    def counts(self, name: Callable[[int], str]) -> dict[str, tuple[int, list[str]]]:
        """How many say what an earlier one says, and are the first to say the opposite, with names of a few."""
        marks = np.frombuffer(self.marks, dtype=np.uint64)
        known = np.flatnonzero(marks)
        values, first = np.unique(marks[known], return_index=True)
        both = np.flatnonzero(values[1:] >> 1 == values[:-1] >> 1)
        result = {
            "repeated": known[np.setdiff1d(np.arange(len(known)), first)],
            "opposed": known[np.sort(np.maximum(first[both], first[both + 1]))],
        }
        return {k: (len(v), [name(place) for place in v[:EXAMPLES].tolist()]) for k, v in result.items() if len(v)}


@dataclass
class Report:
    """What a set holds, and what was left out and why."""

    where: str
    sources: Sequence[Path] = ()
    """Files of the records; none of a data set."""
    rows: int = 0
    winners_only: int = 0
    """Usable records without a rejected picture."""
    counts: dict[str, int] = field(default_factory=dict)
    """Reason -> records skipped."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the first few of them."""
    images: Any = field(default_factory=hashlib.sha256, repr=False)
    """Digest of the names and sizes of the pictures."""
    votes: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """Used records that repeat an earlier one, and that oppose one: how many, and the first few."""

    def add(self, found: Preference) -> None:
        """Count a record that is used, with the names and sizes of its pictures where they are files."""
        self.winners_only += found.rejected is None
        for image in (found.chosen, found.rejected):
            if image is not None and isinstance(image.source, Path):
                self.images.update(f"{image.source.name}\0{image.source.stat().st_size}\n".encode())

    def files(self) -> list[Any]:
        """Names and sizes of the files that the set lies in, and one fingerprint of those of its pictures."""
        return [[file.name, file.stat().st_size] for file in self.sources] + [self.images.hexdigest()]

    def skip(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(example)

    @property
    def usable(self) -> int:
        return self.rows - sum(self.counts.values())

    @property
    def broken(self) -> int:
        """Skipped for another reason than that nothing is preferred."""
        return sum(count for reason, count in self.counts.items() if reason not in BY_RULE)

    def facts(self) -> dict[str, Any]:
        """For provenance.json."""
        return {
            "source": self.where,
            "rows": self.rows,
            "usable": self.usable,
            "winners_only": self.winners_only,
            "skipped": dict(self.counts),
            "examples": {reason: list(shown) for reason, shown in self.examples.items()},
            "votes": {kind: {"count": count, "examples": shown} for kind, (count, shown) in self.votes.items()},
        }

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.usable} of {self.rows} records are used"]
        if self.winners_only:
            lines[0] += f", {self.winners_only} of them with a chosen picture only"
        for reason, count in self.counts.items():
            rest = f" and {count - EXAMPLES} more" if count > EXAMPLES else ""
            lines.append(f"  skipped {count}, {reason}: {'; '.join(self.examples[reason])}{rest}")
        for kind, (count, shown) in self.votes.items():
            rest = f" and {count - EXAMPLES} more" if count > EXAMPLES else ""
            lines.append(f"  used, {count} {kind} (a caption and its pair once more): {'; '.join(shown)}{rest}")
        return "\n".join(lines)
