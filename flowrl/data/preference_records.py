"""Parts of a preference set: images and videos not opened yet, pairs of them, and a report of skipped records."""

import hashlib
import io
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image

from flowrl.data.prompts import Prompt
from flowrl.data.stored_videos import Unfit, frame_files, frames_of, part_of
from flowrl.media import media

BY_RULE = ("tie", "same image twice", "no label")
"""Reasons that are no fault: pairs without a preference, of which there may be any number."""
Result = TypeVar("Result")
EXAMPLES = 3
"""Number of examples kept for each reason."""
_ASPECT_TOLERANCE = 0.01
"""Relative difference of two equal aspects, which sizes rounded to a multiple of pixels explain."""


class Unreadable(Exception):
    """An image or its row cannot be read; `where` is the file or row, `reason` says what is wrong."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where} cannot be read: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image or a video of a set, not opened yet."""

    source: Path | bytes | None
    """File, a video's folder of frames, or the bytes of a file; None: not read with the record."""
    where: str
    """Place in the set, for messages."""
    uid: str | None = None
    """Name of the image in the set; None: it has none."""

    @property
    def key(self) -> str:
        """Identity of the image in all its pairs: its name in the set, its path, or the hash of its bytes."""
        if self.uid is not None or self.source is None:
            return f"uid:{self.uid}"
        if isinstance(self.source, Path):
            return f"file:{self.source}"
        return f"sha256:{hashlib.sha256(self.source).hexdigest()}"

    def open(self) -> Image:
        """The image by `media.open_image`. Raises Unreadable: missing, broken, of an unknown range, or a video."""
        return self._read(lambda: self._single(media.plain))

    def size(self) -> tuple[int, int]:
        """(width, height), upright; raises as `open` does. All bytes are read, a JPEG's in a third of the time."""
        return self._read(lambda: self._single(_measured))

    def header(self) -> tuple[int, int] | None:
        """(width, height), upright, by its header; None: not known, or not read with the record."""
        try:
            return self._single(media.upright_size)
        except media.UNREADABLE:  # whoever opens it says why
            return None

    def frames(self, count: int | None, place: float = 0.5) -> list[Image]:
        """RGB frames of a video. `count`: neighbouring frames that are taken of it; None: all. `place`: theirs in the
        video, in [0, 1]; 0.5 is the middle. Raises Unreadable: it is missing, broken, or shorter.
        """
        return self._read(lambda: part_of(frames_of(self._file()), count, place))

    def files(self) -> list[Path]:
        """Its file, or its files of frames; [] where its bytes are in a table."""
        if not isinstance(self.source, Path):
            return []
        return frame_files(self.source) if self.source.is_dir() else [self.source]

    def content(self) -> str:
        """A hash of its bytes."""
        digest = hashlib.sha256(self.source if isinstance(self.source, bytes) else b"")
        for file in self.files():
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def _single(self, read: Callable[[Image], Result]) -> Result:
        with media.opened(io.BytesIO(self.source) if isinstance(self.source, bytes) else self._file()) as image:
            frames = media.frames_in(image)
            if frames > 1:
                raise ValueError(f"it is a video of {frames} frames, and the model makes images")
            return read(image)

    def _file(self) -> Path:
        if not isinstance(self.source, Path):
            raise ValueError("a video inside a table is not read; save it as a file and give its path")
        return self.source

    def _read(self, read: Callable[[], Result]) -> Result:
        if not self.source:
            raise Unreadable(self.where, "there are no bytes")
        try:
            return read()
        except MemoryError:
            raise
        # Decoders raise many errors about broken bytes: OSError, SyntaxError, ValueError, struct.error, ...
        except Exception as error:
            raise Unreadable(self.where, f"{type(error).__name__}: {error}") from error


def _measured(image: Image) -> tuple[int, int]:
    result = media.upright_size(image)
    image.draft(None, (1, 1))  # a JPEG's pixels are made at an eighth of its size
    media.plain(image)
    return result


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with its preferred and its rejected image, or video."""

    prompt: Prompt
    """Caption, with the other values of the record as metadata."""
    chosen: StoredImage
    rejected: StoredImage | None
    """None: the record has a winner alone."""
    margin: float | None
    """Difference of a reward between the two, above 0; None: not known."""
    key: str
    """Place of the record, unique in the set."""

    def require_aspect(self) -> None:
        """Raise Unfit: a result has another aspect than a source, so that no box shows the same of both."""
        named = [(f"source {Path(file).name}", StoredImage(Path(file), "")) for file in self.prompt.images]
        named += [("chosen", self.chosen), *([] if self.rejected is None else [("rejected", self.rejected)])]
        known = [(name, *size) for name, image in named if (size := image.header()) is not None]
        for name, width, height in known[1:]:
            first, wide, high = known[0]
            if abs(width * high - wide * height) > _ASPECT_TOLERANCE * wide * height:
                raise Unfit("aspects differ", f"{first} has {wide}x{high} pixels, {name} has {width}x{height}")


def is_false(value: Any) -> bool:
    """Whether a flag of a table or a text file is false.

    >>> [is_false(value) for value in (False, 0, None, "0", "False", True, 1, "true")]
    [True, True, True, True, True, False, False, False]
    """
    return not value or (isinstance(value, str) and value.strip().lower() in ("", "0", "0.0", "false", "no"))


class Votes:
    """Pairs that a set judges more than once under one caption; takes 8 bytes a record."""

    def __init__(self) -> None:
        self.marks = array("Q")
        """Hash of caption and pair, whose last bit is the preferred one; 0: not known."""

    def add(self, preference: Preference) -> None:
        """Add a record; images are compared by path or name, without reading bytes."""
        images = [image for image in (preference.chosen, preference.rejected) if image is not None]
        if len(images) < 2 or any(one.uid is None and not isinstance(one.source, Path) for one in images):
            self.marks.append(0)
            return
        won, lost = (image.key for image in images)
        text = "\0".join((preference.prompt.text, *sorted((won, lost))))
        mark = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self.marks.append(int.from_bytes(mark, "big") & ~1 | (won < lost))

    def counts(self, name: Callable[[int], str]) -> dict[str, tuple[int, list[str]]]:
        """Kind -> (count, a few names) of records that repeat an earlier one, or are the first to oppose it."""
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
    """Contents of a set, with the skipped records and the reasons."""

    where: str
    """Key and value of the option that names the set."""
    sources: Sequence[Path] = ()
    """Files of the records; empty for a data set."""
    rows: int = 0
    """Number of records."""
    winners_only: int = 0
    """Usable records without a rejected image."""
    counts: dict[str, int] = field(default_factory=dict)
    """Reason -> number of skipped records."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the first few of them."""
    images: Any = field(default_factory=hashlib.sha256, repr=False)
    """Digest of the names and sizes of the image files."""
    votes: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """`Votes.counts` of the used records."""

    def add(self, used: Preference) -> None:
        """Count a used record, with the names and sizes of its image files."""
        self.winners_only += used.rejected is None
        for image in (used.chosen, used.rejected):
            for file in () if image is None else image.files():
                self.images.update(f"{file.name}\0{file.stat().st_size}\n".encode())

    def files(self) -> list[Any]:
        """Names and sizes of the files of the records, and a fingerprint of those of the images."""
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
        """Number of records skipped for a fault."""
        return sum(count for reason, count in self.counts.items() if reason not in BY_RULE)

    def facts(self) -> dict[str, Any]:
        """Plain data for provenance.json."""
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
            lines[0] += f", {self.winners_only} of them with a chosen image only"
        for reason, count in self.counts.items():
            rest = f" and {count - EXAMPLES} more" if count > EXAMPLES else ""
            lines.append(f"  skipped {count}, {reason}: {'; '.join(self.examples[reason])}{rest}")
        for kind, (count, shown) in self.votes.items():
            rest = f" and {count - EXAMPLES} more" if count > EXAMPLES else ""
            lines.append(f"  used, {count} {kind} (a caption and its pair once more): {'; '.join(shown)}{rest}")
        return "\n".join(lines)
