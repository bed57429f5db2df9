"""The folder that `flowrl pairs` fills: pairs.json, pairs.jsonl and images, and its progress.

A step writes its images to the disk, then its lines, then pairs.json, which holds the number of bytes of valid lines. A
call that was killed in between leaves at most invalid lines, and images that the next call writes again.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.files import is_mapping, known_object, write_atomically, writing
from flowrl.run.changes import differences

FORMAT = "flowrl-pairs-1"
HEADER, LINES, IMAGES = "pairs.json", "pairs.jsonl", "images"


@dataclass(frozen=True, slots=True)
class Done:
    """Progress of a folder."""

    groups: int = 0
    """Finished prompts over all rounds; the next one follows in the order."""
    pairs: int = 0
    ties: int = 0
    """Prompts whose best sample is not more than the margin above their worst."""
    unscored: int = 0
    """Prompts with fewer than two samples that have a score."""
    masked_samples: int = 0
    last_pair: int = 0
    """Finished prompts at the time of the last pair."""
    nbytes: int = 0
    """Size of pairs.jsonl in bytes."""

    def __str__(self) -> str:
        text = f"{self.pairs} pairs, {self.ties} ties skipped"
        if self.unscored:
            text += f", {self.unscored} prompts skipped for want of scores"
        return text + (f", {self.masked_samples} samples not scored" if self.masked_samples else "")


class PairFolder:
    """A set of pairs while it is made; `made_with` holds all that decides the pairs, `facts` is for pairs.json."""

    def __init__(self, path: Path, made_with: dict[str, Any], facts: dict[str, Any]) -> None:
        self.path, self.made_with, self.facts = path, json.loads(json.dumps(made_with)), facts
        self.done = Done()
        self.require_own: Callable[[], None] = lambda: None
        """Raises an error where this is no longer the locked folder."""

    def begin(self) -> Done:
        """Prepare the folder and return its progress. The caller holds its lock.

        Raises ConfigError: it holds something else, pairs made otherwise, or has lost lines.
        """
        file, lines = self.path / HEADER, self.path / LINES
        if not file.is_file():
            own = (".lock", f".{HEADER}.tmp")
            other = sorted(entry.name for entry in self.path.iterdir() if entry.name not in own)
            if other:
                raise ConfigError(
                    f"--out {self.path}: it holds something else ({', '.join(other[:3])}); choose a new folder"
                )
            self._record()  # first: a call that is killed after it goes on below
        record = self._read(file)
        self.done = Done(**record["done"])
        changed = differences(record["made_with"], self.made_with, ())
        if not self.done.groups:
            self._record()  # no pair is there yet: a call that was refused goes on with what it was told
        elif changed:
            raise ConfigError(
                f"--out {self.path}: it holds pairs that were made otherwise: {'; '.join(changed.values())}. Choose "
                "another folder, or the old values to go on"
            )
        size = lines.stat().st_size if lines.is_file() else 0
        if size < self.done.nbytes:
            raise ConfigError(
                f"--out {self.path}: {LINES} has lost lines ({size} bytes of {self.done.nbytes}); choose a new folder"
            )
        lines.touch()
        os.truncate(lines, self.done.nbytes)
        (self.path / IMAGES).mkdir(exist_ok=True)
        return self.done

    def append(self, records: Sequence[dict[str, Any]], tally: dict[str, int]) -> None:
        """Add lines of new pairs, whose images are written, and the counts of all groups of this step."""
        self.require_own()
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        with writing(self.path / LINES), (self.path / LINES).open("ab") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        done = dataclasses.asdict(self.done)
        last = self.done.groups + tally["last_pair"] if tally["last_pair"] else self.done.last_pair
        added = {name: done[name] + value for name, value in tally.items()}
        self.done = Done(**added | {"last_pair": last, "nbytes": self.done.nbytes + len(text)})
        self._record()

    def _record(self) -> None:
        record = {"format": FORMAT, "made_with": self.made_with, "done": dataclasses.asdict(self.done), **self.facts}
        write_atomically(self.path / HEADER, json.dumps(record, indent=1) + "\n")

    def _read(self, file: Path) -> dict[str, Any]:
        record = known_object(file)
        done, names = record.get("done"), {field.name for field in dataclasses.fields(Done)}
        if record.get("format") != FORMAT or not is_mapping(done) or set(done) != names:
            raise ConfigError(f"--out {self.path}: its {HEADER} is not of this command; choose a new folder")
        return record
