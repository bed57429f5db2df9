"""Preference data: pairs of images or videos of which one is preferred, and their order in a run (docs/preferences.md).

A set is scanned once without opening an image; of videos, and of what may be such, the headers are read.
Records that cannot be used are skipped by a stated rule, counted by reason and reported with examples; an image that is
unreadable when it is opened raises `Unreadable` with its place.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.core.rng import stream
from flowrl.core.types import Identity
from flowrl.data.options import PreferenceOptions
from flowrl.data.preference_records import Preference, Report, StoredImage, Unreadable, Votes, is_false
from flowrl.data.prompt_files import note_sampler_keys
from flowrl.data.prompt_sources import cached_image
from flowrl.data.prompts import Prompt, identity
from flowrl.data.rankings import Rankings
from flowrl.data.records import LATER, WINDOW_BYTES, Records, find_records
from flowrl.data.stored_videos import VIDEO, Frames, Unfit
from flowrl.display.console import log
from flowrl.media.media import UNREADABLE, is_animation, is_video_file

_PLAIN = PreferenceOptions()
_MAY_MOVE = (".webp", ".gif", ".avif")


def load_preferences(
    source: str,
    key: str,
    options: PreferenceOptions = _PLAIN,
    *,
    paired: bool = True,
    graded: bool = False,
    videos: Frames | None = None,
) -> "PreferenceSet":
    """A preference set, its report logged.

    `source`: a .jsonl or .parquet, a glob of shards, a folder of either, or hf:PATH[:SPLIT] for a data set; records are
    {prompt, chosen, rejected[, margin]} or Pick-a-Pic's {caption, jpg_0, jpg_1, label_0}. `key`: the configuration key,
    for messages. `paired` skips records without a rejected image; `graded` those without a margin, and makes ties pairs
    of margin 0. `videos`: the frames that videos must have; None: a set of images.

    Raises ConfigError: no such source or column, no usable record, too many broken, a package that is not installed.
    """
    where = f"{key}={source!r}"
    images = (options.chosen, options.rejected, options.first, options.second, options.source or "")
    records = find_records(source, images, options.subset, where)
    records = records if options.ranked is None else Rankings(records, options, where)
    result = PreferenceSet(records, where, options, paired=paired, graded=graded, videos=videos)
    log.info("%s", result.report)
    return result


class PreferenceSet:
    """Usable records 0 .. N-1 of a source, read on demand.

    `report` has its contents; `fingerprint` is a hash of prompts, labels and places, which differs between sets.
    """

    def __init__(
        self,
        records: Records,
        where: str,
        options: PreferenceOptions,
        *,
        paired: bool,
        graded: bool = False,
        videos: Frames | None = None,
    ) -> None:
        self.records, self.options, self.paired, self.graded, self.videos = records, options, paired, graded, videos
        self.report = Report(where, records.files)
        # Sources are shared by many records; a path takes about 200 bytes.
        self._animated, self._fault = lru_cache(2**16)(is_animation), lru_cache(2**16)(_fault)
        names = records.names()
        note_sampler_keys(where, names)
        self.text = _text_column(names, options, where)
        self.voted = options.chosen not in names
        """Whether records are two images with a label, not a chosen and a rejected one."""
        wanted = (options.first, options.second, options.label) if self.voted else ()
        self.named = (*(wanted or (options.chosen, options.rejected, "margin")), options.source or "")
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"{where}: needs {options.chosen!r}, or {', '.join(map(repr, wanted))}; has no {name!r}; "
                    f"{suggest(name, names)}there are: {', '.join(names)}"
                )
        self.rows, self.fingerprint = self._scan()
        if not self.report.usable:
            raise ConfigError(f"{self.report}\n{where}: no record can be used")
        if self.report.broken > options.max_broken * self.report.rows:
            raise ConfigError(
                f"{self.report}\n{where}: {self.report.broken} of {self.report.rows} records are broken, more than "
                f"max_broken={options.max_broken} allows; mend the set, or raise it"
            )

    def _scan(self) -> tuple[np.ndarray, str]:
        """(usable rows [N] int64, fingerprint)."""
        rows, digest, votes = [], hashlib.sha256(), Votes()
        for row, record in enumerate(self.records.scan()):
            self.report.rows += 1
            try:
                result = self._fitting(self._preference(record, row))
            except Unfit as skipped:
                reason, what = skipped.args
                self.report.skip(reason, f"{self.records.place(row)}{f' ({what})' if what else ''}")
                continue
            rows.append(row)
            votes.add(result)
            self.report.add(result)
            values = [(record or {}).get(name) for name in self.named]
            named = [value for value in values if isinstance(value, (str, int, float))]
            digest.update(repr((row, result.prompt.text, named)).encode())
        self.report.votes = votes.counts(lambda place: self.records.place(rows[place]))
        return np.asarray(rows, dtype=np.int64), digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Preference:
        """One record; its sources are opened, each once. Raises Unreadable: a broken one, no image, other rows."""
        row = int(self.rows[index])
        where = f"{self.report.where}, {self.records.place(row)}"
        try:
            result = self._fitting(self._preference(self.records.read(row), row))
        except Unfit as skipped:  # an image inside a table, which the scan does not read; a file that has changed
            reason, what = skipped.args
            raise Unreadable(where, f"{reason} ({what})") from None
        except OSError as error:
            raise Unreadable(where, str(error)) from error
        for file in result.prompt.images:
            if fault := self._fault(file):
                raise Unreadable(f"{where}, {self.options.source} ({file})", fault)
        return result

    def captions(self) -> Iterator[Identity]:
        """Every distinct text with its sources, none with a broken one, in the order of its first record."""
        seen: set[bytes] = set()
        for index, record in self._usable():
            asked: Identity = str(record[self.text]), ()
            if self.options.source is not None:
                try:
                    asked = identity(self.read(index).prompt)
                except Unreadable:
                    continue
            mark = hashlib.sha256(repr(asked).encode("utf-8", "surrogatepass")).digest()[:16]
            if mark not in seen:
                seen.add(mark)
                yield asked

    @cached_property
    def some_sources(self) -> tuple[str, ...]:
        """Sources of the first record that can be read, for one that cannot: a model that edits needs some."""
        return () if self.options.source is None else next((images for _, images in self.captions()), ())

    def identities(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """(index, text, keys of the chosen and of a rejected image) of every record in order.

        Reads all images if only their bytes identify them.
        """
        for index, record in self._usable():
            result = self._preference(record, int(self.rows[index]))
            images = [result.chosen, *([] if result.rejected is None else [result.rejected])]
            if any(image.source is None and image.uid is None for image in images):
                result = self.read(index)
                images = [result.chosen, *([] if result.rejected is None else [result.rejected])]
            yield index, result.prompt.text, tuple(image.key for image in images)

    def _usable(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, scanned record) of every usable record."""
        rows = iter(self.rows.tolist())
        wanted, index = next(rows, None), 0
        for row, record in enumerate(self.records.scan()):
            if row == wanted:
                assert record is not None
                yield index, record
                wanted, index = next(rows, None), index + 1

    def arrange(self, indices: np.ndarray, seed: int, purpose: str, epoch: int) -> np.ndarray:
        """A random order of records `indices` [n], as positions in `indices`, [n] int64.

        It depends on the arguments and the set alone. Storage that is read in blocks is shuffled block-wise, so that
        neighbours stay close.
        """
        window = np.zeros(len(indices), dtype=np.int64)
        blocks = self.records.blocks()
        if blocks is not None:
            block = np.searchsorted(blocks[:, 0], self.rows[indices], side="right") - 1
            window = _windows(blocks[:, 1], stream(seed, f"{purpose}/blocks", epoch))[block]
        return np.lexsort((stream(seed, purpose, epoch).random(len(indices)), window))

    # ---- from a record to a preference

    def _preference(self, record: dict[str, Any] | None, row: int) -> Preference:
        """The preference of a record. Raises Unfit: the record cannot be used."""
        if record is None:
            raise Unfit("not a record", "")
        text = record.get(self.text)
        if not isinstance(text, str) or not text.strip():
            raise Unfit("no caption", f"{self.text}={text!r}")
        if self.voted:
            (chosen, its), (rejected, other), margin = self._voted(record)
        else:
            chosen, rejected = self.options.chosen, self.options.rejected
            its, other, margin = None, None, _margin(record.get("margin"), self.graded)
        won = self._image(record, chosen, its, row)
        lost = None if record.get(rejected) is None and not self.voted else self._image(record, rejected, other, row)
        if lost is None and self.paired:
            raise Unfit("no rejected image", "")
        if lost is not None and isinstance(won.source, Path) and won.source == lost.source:
            raise Unfit("same image twice", won.source.name)
        if lost is not None and won.uid is not None and won.uid == lost.uid:
            raise Unfit("same image twice", won.uid)
        options = self.options
        apart = (self.text, options.chosen, options.rejected, options.first, options.second, options.source, "margin")
        metadata = {name: value for name, value in record.items() if name not in apart}
        images = self._sources(record, row)
        metadata |= {"images": list(images)} if images else {}
        return Preference(Prompt(text, metadata, images), won, lost, margin, self.records.place(row))

    def _sources(self, record: dict[str, Any], row: int) -> tuple[str, ...]:
        """Paths of the images that the prompt edits; those of a table come with the row. Raises Unfit: no image."""
        column = self.options.source
        if column is None or record.get(column) is LATER:
            return ()
        given, result = record.get(column), list[str]()
        for one in given if isinstance(given, list) and given else [given]:
            found = self._image({column: one}, column, None, row).source
            try:
                file = cached_image(found) if isinstance(found, bytes) else found
            except UNREADABLE as error:
                raise Unfit("source not an image", f"{column}: {error}") from None
            if not isinstance(file, Path) or file.is_dir() or is_video_file(file) or self._animated(file):
                raise Unfit("source not an image", f"{column}={str(file)[-60:]}: give one still image")
            result.append(str(file))
        return tuple(result)

    def _fitting(self, result: Preference) -> Preference:
        """The preference itself. Raises Unfit: its videos or aspect do not fit, or a set of images has videos."""
        if self.options.source_fit == "cover":
            result.require_aspect()
        sources = [image.source for image in (result.chosen, result.rejected) if image is not None]
        if self.videos is None:
            for source in sources:
                if not isinstance(source, Path):
                    continue
                moves = source.suffix.lower() in _MAY_MOVE and self._animated(source)
                if moves or source.is_dir() or is_video_file(source):
                    raise Unfit(VIDEO, f"{source.name}; use a model of videos")
            return result
        self.videos.require(*sources)
        return result

    def _voted(self, record: dict[str, Any]) -> tuple[tuple[str, Any], tuple[str, Any], float | None]:
        """(column and name of the winner, of the loser, the difference of their labels where margins count)."""
        options = self.options
        if options.labelled in record and is_false(record[options.labelled]):
            raise Unfit("no label", "")
        label, other = record.get(options.label), record.get(options.other_label)
        if label not in (0, 0.5, 1) or isinstance(label, bool) or (other is not None and other != 1 - label):
            raise Unfit("label not 0, 0.5 or 1", f"{options.label}={label!r}, {options.other_label}={other!r}")
        if label == 0.5 and not self.graded:
            raise Unfit("tie", "")
        pair = [(options.first, record.get(options.first_id)), (options.second, record.get(options.second_id))]
        won, lost = reversed(pair) if label == 0 else pair
        return won, lost, abs(2.0 * label - 1.0) if self.graded else None

    def _image(self, record: dict[str, Any], column: str, uid: Any, row: int) -> StoredImage:
        value, where = record.get(column), f"{self.report.where}, {self.records.place(row)}, {column}"
        name = None if uid is None else str(uid)
        if value is LATER:
            return StoredImage(None, where, name)
        if isinstance(value, dict):  # as data sets store images
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes) and value:
            return StoredImage(value, where, name)
        if not isinstance(value, str) or not value:
            raise Unfit("missing image", f"{column}={str(value)[:60]}")
        file = Path(os.path.expanduser(value))  # Path.expanduser() raises where there is no such user
        if not file.is_absolute() and self.records.folder is None:
            raise Unfit("missing image", f"{column}={value[:60]!r} is a relative path, and the set has no folder")
        file = file if self.records.folder is None else self.records.folder / file
        try:
            there = file.is_file() or file.is_dir()  # of a video's frames
        except OSError:  # such as a name that is too long
            there = False
        if not there:
            raise Unfit("missing image", f"{column}={value[:60]!r}")
        return StoredImage(file.resolve(), f"{where} ({value})", name)


def _fault(file: str) -> str:
    """What is wrong with an image file; "" where it can be read."""
    try:
        StoredImage(Path(file), file).size()
    except Unreadable as error:
        return error.reason
    return ""


def _text_column(names: Sequence[str], options: PreferenceOptions, where: str) -> str:
    wanted = ("prompt", "caption") if options.prompt is None else (options.prompt,)
    result = next((name for name in wanted if name in names), None)
    if result is None:
        close = suggest(wanted[0], list(names))
        raise ConfigError(
            f"{where}: needs a column {' or '.join(map(repr, wanted))}; {close}there are: {', '.join(names) or 'none'}"
        )
    return result


def _margin(value: Any, graded: bool) -> float | None:
    if value is None:
        if graded:
            raise Unfit("no margin", "algorithm.margin needs one")
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise Unfit("margin not a number from 0", f"margin={str(value)[:60]}")
    if value == 0 and not graded:
        raise Unfit("tie", "margin=0")
    return float(value)


def _windows(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Window of each of K blocks with sizes in bytes [K]; a window has blocks of WINDOW_BYTES in random order."""
    window, filled, result = 0, 0, np.zeros(len(sizes), dtype=np.int64)
    for block in rng.permutation(len(sizes)):
        if filled and filled + sizes[block] > WINDOW_BYTES:
            window, filled = window + 1, 0
        result[block] = window
        filled += int(sizes[block])
    return result


class PreferenceSource:
    """An endless, seeded order over the records of a set, each record once in every epoch.

    The draw of an iteration depends on (seed, iteration) and the set alone.
    """

    def __init__(self, pairs: PreferenceSet, per_iteration: int, seed: int) -> None:
        self.pairs, self.per_iteration, self.seed = pairs, per_iteration, seed
        self._order: tuple[int, np.ndarray] | None = None
        """(last epoch asked for, the order in it)."""

    def draw(self, iteration: int) -> list[int]:
        """Indices of the records of an iteration; iterations count from 1."""
        start = (iteration - 1) * self.per_iteration
        return [self._at(place) for place in range(start, start + self.per_iteration)]

    def _at(self, place: int) -> int:
        epoch, inside = divmod(place, len(self.pairs))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.pairs.arrange(np.arange(len(self.pairs)), self.seed, "preferences", epoch)
        return int(self._order[1][inside])

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.pairs.fingerprint, "count": len(self.pairs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the set with a checkpoint's; the order has no state. Raises ConfigError: the set has changed."""
        now = self.state_dict()
        if state != now:
            raise ConfigError(
                f"{self.pairs.report.where}: the preference set has changed since the checkpoint ({state['count']} "
                f"usable records then, {now['count']} now); restore it, or start a new run"
            )
