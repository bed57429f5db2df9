"""A run folder that is watched: what is new in it, by calls of stat, and whether its run is alive."""

import os
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.apps.gallery.runs import number
from flowrl.core.errors import ConfigError
from flowrl.core.files import loads, read_rows
from flowrl.run import status

_SUFFIXES = (".json", ".jsonl", ".yaml")
"""Files of a run folder that its page is made of, in the folder itself, `eval/` and `previews/`."""
_QUIET_S, _QUIET_ROWS = 600.0, 20.0
"""Where the lock says nothing, a run is dead after so many seconds without a write, at least so many iterations."""

Files = tuple[tuple[str, int, int], ...]
"""(name, bytes, time of the last write in ns) of each file."""


@dataclass
class Rows:
    """Rows of a `metrics.jsonl` that grows: each line is read once. The file of a resumed run is read anew."""

    file: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    _place: tuple[int, int] = (0, 0)
    """(inode, bytes that were read)."""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(complete rows, whether the last line is half written). Raises ConfigError: an earlier line is damaged."""
        try:
            with self.file.open("rb") as stream:
                inode, size = os.fstat(stream.fileno()).st_ino, os.fstat(stream.fileno()).st_size
                known, offset = self._place
                if inode != known or size < offset:
                    self.rows, offset = [], 0
                stream.seek(offset)
                new = stream.read()
        except OSError:
            self.rows, self._place = [], (0, 0)
            return [], False
        whole = new.rfind(b"\n") + 1
        try:
            found = [loads(line) for line in new[:whole].splitlines() if line.strip()]
            self.rows = self.rows + [row | {"iteration": int(row["iteration"])} for row in found]
        except (ValueError, KeyError, TypeError, OverflowError):
            # The reader of whole files names the line and the remedy.
            self.rows, self._place = [], (0, 0)
            return read_rows(self.file)
        self._place = (inode, offset + whole)
        return self.rows, bool(new[whole:].strip())


class Watched:
    """A run folder under the eyes of `flowrl watch`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reader = folder, Rows(folder / "metrics.jsonl")
        self.files: Files = ()
        self.name, self.planned = folder.resolve().name, float("nan")
        """Name and planned iterations; those of the configuration once the page was built."""
        self._summary: tuple[Files, dict[str, Any]] = ((), {})
        self._locked: bool | None = False
        self._grew_unlocked = -float("inf")
        """Time at which the folder changed although nobody held its lock: its run is on another machine."""

    def look(self) -> None:
        """Ask for what is there now: calls of stat, and one for the lock."""
        before, self.files = self.files, scan(self.folder)
        self._locked = status.asked_lock(self.folder)
        new = {entry[0] for entry in set(self.files) - set(before)}
        # A summary alone is written by other commands too.
        if before and self._locked is not True and any(name.startswith(("metrics.jsonl", "eval/")) for name in new):
            self._grew_unlocked = time.time()

    @property
    def version(self) -> tuple[Files, bool]:
        """What the page of this run is made of."""
        return self.files, self.alive

    @property
    def alive(self) -> bool:
        """Whether a process writes to the folder: it holds the lock, or it writes and the lock cannot be asked."""
        if self._locked:
            return True
        seconds = [number(row.get("time/iteration_s")) for row in self.reader.rows[-9:]]
        quiet = max([_QUIET_S, *(_QUIET_ROWS * s for s in seconds if s == s)])
        written = max((entry[2] / 1e9 for entry in self.files), default=0.0) if self._locked is None else 0.0
        return time.time() - max(written, self._grew_unlocked) < quiet

    def summary(self) -> dict[str, Any]:
        """`summary.json` with the run's present status; {} if there is none."""
        mark = tuple(entry for entry in self.files if entry[0] == status.SUMMARY)
        if mark != self._summary[0]:
            try:
                found = loads((self.folder / status.SUMMARY).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                found = {}
            self._summary = (mark, found if isinstance(found, dict) else {})
        return status.now(self._summary[1], self.folder, self.alive)

    def state(self) -> dict[str, Any]:
        """What the page's line says: `state` (live, died, ended or gone), `text`, `command`, age of the last row."""
        if not self.files:
            text = f"The folder {self.folder} is no longer there, or holds no run. The page shows what it last read."
            return {"name": self.name, "state": "gone", "text": text, "command": "", "age_s": None, "at": ""}
        damage = ""
        try:
            rows, _ = self.reader.read()
        except ConfigError:  # the page says which line
            rows, damage = [], " A line of metrics.jsonl is damaged."
        summary = self.summary()
        evaluated = any(name.startswith("eval/") for name, _, _ in self.files)
        word, text = _sentence(summary.get("status"), self.alive, rows, evaluated, self.planned)
        if summary.get("status") == status.GUARDED:
            text = _guarded(summary, text)
        reason = str(summary.get("reason") or "") if word == "died" else ""
        # Another program than train may have ended it.
        resume = summary.get("command") or f"flowrl train {shlex.quote(str(self.folder))} --resume"
        goes_on = word != "live" and summary.get("status") not in status.ENDED
        written = next((entry[2] / 1e9 for entry in self.files if entry[0] == "metrics.jsonl" and entry[1]), None)
        return {
            "name": self.name,
            "state": word,
            "text": text + (f" ({reason})." if reason else ".") + damage,
            "command": str(resume) if goes_on else "",
            "age_s": None if written is None else max(0.0, round(time.time() - written, 1)),
            "at": "" if written is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)),
        }


def scan(folder: Path) -> Files:
    """The files that a page is made of, with size and time, sorted; () without a config.yaml."""
    found: list[tuple[str, int, int]] = []
    for prefix in ("", "eval/", "previews/"):
        try:
            with os.scandir(folder / prefix) as entries:
                for entry in entries:
                    if entry.name.endswith(_SUFFIXES) and not entry.name.startswith("."):
                        known = entry.stat()
                        found.append((prefix + entry.name, known.st_size, known.st_mtime_ns))
        except OSError:  # not there yet, no longer there, or a file that was renamed in between
            continue
    return tuple(sorted(found)) if any(entry[0] == "config.yaml" for entry in found) else ()


def require_run(folder: Path) -> None:
    """Raises a ConfigError for a folder that holds no run."""
    if scan(folder):
        return
    if not folder.exists():
        what = "there is no such folder"
    elif not folder.is_dir():
        what = "it is a file"
    else:
        what = "the folder is empty" if not any(folder.iterdir()) else "it has no config.yaml"
    raise ConfigError(
        f"RUN {folder} is not a run: {what}; give the folder that flowrl train writes, <output>/<name>. A run that was "
        "just started has its config.yaml after some seconds"
    )


def _sentence(word: Any, alive: bool, rows: list[dict[str, Any]], evaluated: bool, planned: float) -> tuple[str, str]:
    """(state, sentence without its full stop) about a run of the status `word`."""
    done = rows[-1]["iteration"] if rows else 0
    at = f"at iteration {done}" if rows else "before the first iteration"
    if word == status.DIED or (word is None and not alive):
        return (
            "died",
            f"Died {at}" if word else f"Not finished, {at}: it has no summary.json, and no process writes to it",
        )
    if word == "running" or (word is None and alive):
        if rows:
            return "live", f"Live: iteration {done}" + (f" of {planned:.0f}" if planned >= done else "")
        return "live", "Live: waits for the first iteration" if evaluated else "Live: waits for the first evaluation"
    return "ended", f"{str(word).capitalize()} {at}"


def _guarded(summary: dict[str, Any], text: str) -> str:
    """The sentence, without its full stop, of a run that its guard ended: with the alarm, and whose weights it has."""
    found = summary.get("guard")
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    ended, taken, sentence = facts.get("ended"), facts.get("taken"), str(facts.get("sentence") or "").rstrip(".")
    if not sentence:
        return text
    which = "" if taken == ended else f", and its weights are those of iteration {taken}"
    return f"Ended by its guard at iteration {ended}{which}. {sentence}"
