"""The folder of a suite's results for one model: its header, images, and one line a sample.

    header.json      what made the images (`made_with`), who judged them (`judged_by`), and facts of the machine
    samples.jsonl    the lines of judged samples; samples-RANK.jsonl while processes are at work
    samples-judged-N.jsonl    the lines of the N-th of `judged_before`, set aside
    images/          ID-K.png, or ID-K.webp of videos with ID-K.json beside it

A line is written when its sample is judged, an image before that, under its last name only when it is complete. So a
call that is killed leaves what is done, and the same call goes on.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.files import is_mapping, json_ready, read_object, write_atomically, writing
from flowrl.evaluation.suite import Item, Row
from flowrl.media import media

FORMAT = "flowrl-suite-1"
HEADER, LINES, IMAGES = "header.json", "samples.jsonl", "images"


@dataclass(frozen=True, slots=True)
class ResultsFolder:
    """Results of one model on one suite."""

    path: Path
    videos: bool = False
    """The samples are videos."""
    fps: float = media.FPS
    """Frames a second of videos that are written."""

    @property
    def header(self) -> dict[str, Any]:
        """The data of header.json; {} before the first call. Raises ConfigError: damaged, or of another program."""
        file = self.path / HEADER
        if not file.is_file():
            return {}
        result = read_object(file, "choose another folder with --out")
        if result.get("format") != FORMAT:
            raise ConfigError(f"{file} is not of a benchmark suite; choose another folder with --out")
        return result

    def begin(self, made_with: Mapping[str, Any], judged_by: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the header, or compare it with that of earlier calls.

        `made_with` decides the images, `judged_by` the scores; {}: nobody judges now, and an earlier judge stays.
        `facts` are only recorded.

        Raises ConfigError: the folder holds images made, or lines judged, in another way.
        """
        old, made, judged = self.header, _plain(made_with), _plain(judged_by)
        if old:
            self._require_same(old["made_with"], made, "images made in another way", "")
            if old["judged_by"] and judged:
                remedy = ", or --rejudge to judge the same images anew"
                self._require_same(old["judged_by"], judged, "scores of another judge", remedy)
        header = {
            "format": FORMAT,
            "made_with": made,
            "judged_by": judged or old.get("judged_by", {}),
            "facts": old.get("facts") or _plain(facts),
            "judged_before": old.get("judged_before", []),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / HEADER, json.dumps(header, indent=1) + "\n")

    def require_made(self, facts: Mapping[str, Any]) -> None:
        """Refuse a folder without images, or one whose images were made with other values of these facts.

        Raises ConfigError: naming the values.
        """
        old, now = self.header, _plain(facts)
        if not old:
            raise ConfigError(f"--results: {self.path} holds no images of a suite; make them first, with --export DIR")
        self._require_same({key: old["made_with"].get(key) for key in now}, now, "images made in another way", "")

    def _require_same(self, old: Any, new: Any, what: str, remedy: str) -> None:
        changed = differences(old, new)
        if changed:
            raise ConfigError(
                f"--out {self.path}: it holds {what}: {'; '.join(changed[:5])}. Give the old values to go on there, or "
                f"another folder with --out{remedy}"
            )

    def forget_judge(self) -> None:
        """Set the lines of an earlier judge aside, as samples-judged-N.jsonl, so that the images are judged anew."""
        old = self.header
        if not old or not old["judged_by"]:
            return
        self.collect()
        before = [*old.get("judged_before", []), old["judged_by"]]
        with writing(self.path):
            if (self.path / LINES).is_file():
                (self.path / LINES).rename(self._set_aside(len(before)))
        write_atomically(
            self.path / HEADER, json.dumps(old | {"judged_by": {}, "judged_before": before}, indent=1) + "\n"
        )

    def _set_aside(self, number: int) -> Path:
        return self.path / f"samples-judged-{number}.jsonl"

    def judged_before(self) -> dict[tuple[str, int], Row]:
        """(id, k) -> its line by the same judge, the last time that it judged these images; {}: it judged them once."""
        header = self.header
        for number, judge in reversed(list(enumerate(header.get("judged_before", ()), 1))):
            if judge == header["judged_by"] and self._set_aside(number).is_file():
                return _read_lines([self._set_aside(number)])
        return {}

    def take_results(self, rows: Iterable[Row], judged_by: Mapping[str, Any]) -> None:
        """Replace all lines by those that an official evaluator judged.

        Raises ConfigError: the folder holds the scores of another judge, or has no images yet.
        """
        self.require_made({})
        self.begin(self.header["made_with"], judged_by, {})
        self.write(rows)

    # ---- lines

    def _files(self) -> list[Path]:
        running = sorted(self.path.glob("samples-[0-9]*.jsonl"))
        return [file for file in (self.path / LINES, *running) if file.is_file()]

    def rows(self) -> dict[tuple[str, int], Row]:
        """(id, k) -> its last line; a torn line of a call that was killed is left out."""
        return _read_lines(self._files())

    def write(self, rows: Iterable[Row]) -> None:
        """Replace all lines by these."""
        ordered = sorted(rows, key=lambda row: (row.id, row.k))
        write_atomically(self.path / LINES, "".join(_line(row.plain()) for row in ordered))
        for file in self._files():
            if file.name != LINES:
                file.unlink()

    def collect(self) -> dict[tuple[str, int], Row]:
        """Join the lines of all processes in one file, ordered by (id, k); no process may be at work."""
        rows = self.rows()
        if any(file.name != LINES for file in self._files()):
            self.write(rows.values())
        return rows

    def append(self, rows: Iterable[Row], rank: int) -> None:
        """Add lines of judged samples; they are on the disk when this returns."""
        append_lines(self.path / f"samples-{rank}.jsonl", map(Row.plain, rows))

    # ---- images

    def image(self, item: Item, k: int) -> Path:
        return self.path / IMAGES / f"{item.id}-{k:03d}{'.webp' if self.videos else '.png'}"

    def read(self, item: Item, k: int) -> Tensor:
        """A saved image [3, H, W] or video [F, 3, H, W] in [0, 1]. Raises ConfigError: damaged, gone, or selected."""
        file = media.unselected(self.image(item, k))
        try:
            return media.read(file)
        except media.UNREADABLE as error:
            remedy = "delete it, and the same command makes it again"
            raise ConfigError(f"{file} cannot be read ({error}); {remedy}") from error

    def keep(self, image: Tensor, item: Item, k: int, note: Mapping[str, Any]) -> None:
        """Save an image [3, H, W] or a video [F, 3, H, W] in [0, 1], each value rounded to one of 256 levels."""
        target = self.image(item, k)
        part = media.write(image, target.with_name(f".{target.stem}-part"), note, fps=self.fps)
        with writing(target):
            if self.videos:  # its note is a file of its own
                os.replace(part.with_suffix(".json"), target.with_suffix(".json"))
            os.replace(part, target)


def _read_lines(files: Iterable[Path]) -> dict[tuple[str, int], Row]:
    return {(row.id, row.k): row for file in files for row in lines_of(file, Row)}


def lines_of(file: Path, kind: type[Any]) -> Iterator[Any]:
    """The dataclasses of a .jsonl, an empty line and the torn one of a call that was killed left out."""
    names = {one.name for one in fields(kind)}
    for text in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield kind(**{key: value for key, value in json.loads(text).items() if key in names})
        except (ValueError, TypeError, AttributeError):
            continue


def append_lines(file: Path, records: Iterable[Any]) -> None:
    """Add lines to a .jsonl, after one that a kill tore off too; they are on the disk when this returns."""
    with writing(file), file.open("a+b") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
        start = "" if stream.read(1) in (b"", b"\n") else "\n"
        stream.write((start + "".join(map(_line, records))).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _line(record: Any) -> str:
    return json.dumps(json_ready(record), ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """As it is read back from JSON."""
    return json.loads(json.dumps(json_ready(value), default=str))


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Values that differ in two trees, as "key was 1, now 2".

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b was 1, now 3']
    """
    if is_mapping(old) and is_mapping(new):
        keys = dict.fromkeys((*old, *new))
        return [one for key in keys for one in differences(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))]
    return [] if old == new else [f"{place} was {old!r}, now {new!r}"]
