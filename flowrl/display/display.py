"""The display of a process: what it is doing, redrawn in a terminal, as plain lines elsewhere, or as JSON.

One display is open at a time (`opened`), in the first process. Whoever works says so with `working`, `Progress` or
`phases.phase`; without a display these cost a look at a variable. Nothing here imports torch.

The lines of a terminal are drawn at the cursor, which then goes back to their beginning and stays visible: whatever is
written next takes their place, whoever writes it, and nothing has to be put right when the process is killed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO

from flowrl.core.files import json_ready
from flowrl.display.board import (
    ARROWS,
    ASCII_ARROWS,
    PHASES,
    Board,
    Evaluations,
    Scores,
    Work,
    live_lines,
    waiting_line,
)

Mode = Literal["auto", "quiet", "json"]
KINDS = ("start", "phase", "iteration", "evaluation", "warning", "saved", "end")
"""Kinds of JSON objects (docs/watching.md)."""
_REDRAW_S, _BEAT_S = 0.1, 0.5
_FIRST_S, _AGAIN_S = 2.0, 30.0
"""Seconds of a wait until a plain line says so, and until the next one does."""
_CLEAR = "\r\x1b[J"


class Above(io.TextIOBase):
    """A stream of the terminal: what is written to it takes the place of the display's lines."""

    encoding: str = "utf-8"

    def __init__(self, stream: TextIO, display: Display) -> None:
        self.stream, self.display, self.encoding = stream, display, stream.encoding

    def write(self, text: str) -> int:
        with self.display.lock:
            self.display.clear()
            count = self.stream.write(text)
            # Below a line that is not ended, such as another program's bar, nothing is drawn.
            self.display.free = text.endswith("\n") if text else self.display.free
        return count

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:
        return self.stream.buffer


class Display:
    """What one process shows.

    Args:
        mode: "auto" draws where the error stream is a terminal and prints lines elsewhere; "quiet": warnings and the
            verdict alone; "json": one object a line on the output stream, which has nothing else.
        main: this is the first process; another shows its warnings alone.
    """

    def __init__(self, mode: Mode = "auto", *, main: bool = True) -> None:
        self.mode, self.main, self.board = mode, main, Board()
        self.out, self.err = sys.stdout, sys.stderr
        self.lock = threading.RLock()
        self.result: dict[str, Any] = {}
        """What the command's object "end" holds."""
        self.free = True
        """The cursor is at the beginning of a line."""
        self.terminal = main and mode == "auto" and self.err.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn, self._shown, self._spoke = False, 0.0, time.monotonic()
        self._arrows = ARROWS if _can_write(self.err, ARROWS) else ASCII_ARROWS
        self._ended, self._beats = threading.Event(), main and mode != "quiet"
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        if self.terminal:
            sys.stderr = Above(self.err, self)
            sys.stdout = Above(self.out, self) if self.out.isatty() else self.out
        elif self.mode == "json":
            sys.stdout = self.err  # what others print is no JSON
        if self._beats:
            self._thread = threading.Thread(target=self._beat, name="display", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        with self.lock:
            self.clear()
            self.terminal = False
        sys.stdout, sys.stderr = self.out, self.err

    # ---- what happens

    def begin(self, work: Work) -> None:
        first = not self.board.works
        self.board.add_work(work)
        if self.mode == "json" and first and not self.board.total:
            self._phase(work, work.started)
        self.refresh()

    def end(self, work: Work) -> None:
        with suppress(ValueError):
            self.board.works.remove(work)
        self.refresh()

    def send(self, kind: str, **facts: Any) -> None:
        """Write an object of one of `KINDS`, in the mode "json" alone."""
        if self.mode != "json" or not (self.main or kind == "warning"):
            return
        with self.lock, suppress(OSError, ValueError):  # nobody reads any more: the run goes on
            self.out.write(json.dumps(json_ready({"kind": kind} | facts), default=str) + "\n")
            self.out.flush()

    def spoke(self) -> None:
        """Note that a line was printed."""
        self._spoke = time.monotonic()

    # ---- drawing

    def clear(self) -> None:
        """Take the lines away; the cursor is where they began."""
        if self._drawn:
            self._drawn = False
            self._write(_CLEAR)

    def refresh(self, *, late: bool = False) -> None:
        """Draw, unless that was done a moment ago or another thread is at it; `late`: say what takes long."""
        now = time.monotonic()
        if not (self.terminal or late) or now - self._shown < _REDRAW_S or not self.lock.acquire(blocking=False):
            return
        try:
            self._shown = now
            if self.terminal:
                self._draw(now)
            elif self.main and self.mode != "quiet":
                self._say(now)
        finally:
            self.lock.release()

    def _draw(self, now: float) -> None:
        if not self.free:
            return
        width, height = _size(self.err)
        lines = live_lines(self.board, now, width - 1, self._arrows)[: max(height - 1, 1)]
        if not lines:
            return self.clear()
        self._drawn = True
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        self._write("\r" + "\n".join(f"{_encodable(line, self.err)}\x1b[K" for line in lines) + f"\x1b[J{up}\r")

    def _say(self, now: float) -> None:
        """A line about work that takes long: after 2 s, within an iteration after 30 s, and every 30 s."""
        work = self.board.current(now)
        if work is None:
            return
        last = max(self._spoke, work.said or work.started)
        quick = work.said is None and not self.board.iterating and now - work.started >= _FIRST_S
        if not quick and now - last < _AGAIN_S and not (self.mode == "json" and self._fresh(work, now)):
            return
        work.said = self._spoke = now
        if self.mode == "json":
            self._phase(work, now)
        else:
            self._write(_encodable(waiting_line(self.board, work, now), self.err) + "\n")

    def _fresh(self, work: Work, now: float) -> bool:
        return work.said is None and now - work.started >= _BEAT_S

    def _phase(self, work: Work, now: float) -> None:
        work.said = now
        facts: dict[str, Any] = {"phase": work.name.rpartition(": ")[2], "seconds": round(now - work.started, 1)}
        if work.total:
            facts |= {"done": work.done, "total": work.total, "left_s": work.left(now)}
        if self.board.total:
            facts |= {"finished": self.board.iteration, "iterations": self.board.total}
            facts["run_left_s"] = self.board.run_left(now)
            facts["evaluations_left_s"] = self.board.evaluations_left()
        self.send("phase", **facts)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone ends no run
            self.err.write(text)
            self.err.flush()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self.refresh(late=True)


_open: list[Display] = []


def current() -> Display | None:
    """The display that is open."""
    return _open[-1] if _open else None


def _forked() -> None:
    _open.clear()  # its thread is the parent's, and its lock may be held


os.register_at_fork(after_in_child=_forked)


@contextmanager
def opened(mode: Mode = "auto", *, main: bool = True) -> Generator[Display]:
    """A display, until the end of the block; inside another one that one."""
    if _open:
        yield _open[-1]
        return
    display = Display(mode, main=main)
    display.open()
    _open.append(display)
    try:
        yield display
    finally:
        if display in _open:
            _open.remove(display)
            display.close()


@contextmanager
def working(name: str) -> Generator[None]:
    """Say what the block does, or waits for; `name` is one of `board.PHASES`, or words."""
    display = current()
    if display is None or not display.main:
        yield
        return
    work = Work(PHASES.get(name, name), time.monotonic())
    display.begin(work)
    try:
        yield
    finally:
        display.end(work)


class Progress:
    """A counted work, with a bar in a terminal; silent if `show` is false.

    Without a display it opens one in a terminal for itself.
    """

    def __init__(self, total: int, text: str, *, show: bool) -> None:
        self.work, self.show = Work(text, time.monotonic(), total), show and total > 0
        self._own: Display | None = None
        if self.show and not _open and sys.stderr.isatty():
            self._own = Display()
            self._own.open()
            _open.append(self._own)
        self.display = current() if self.show else None
        if self.display is not None:
            self.display.begin(self.work)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, count: int) -> None:
        self.work.done += count
        if self.display is not None:
            self.display.refresh()

    def close(self) -> None:
        if self.display is not None:
            self.display.end(self.work)
        if self._own is not None and self._own in _open:
            _open.remove(self._own)
            self._own.close()


# ---- what a run tells


def run_starts(start: int, iterations: int, evaluations: Evaluations | None = None, **facts: Any) -> None:
    """A run goes on after the iteration `start`; `evaluations`: those that it plans."""
    if (display := current()) is not None:
        board = display.board
        board.evaluations = evaluations or Evaluations()
        board.start = board.iteration = start
        board.total = iterations
        display.send("start", iterations=iterations, finished=start, **facts)


def iteration_done(row: Mapping[str, Any]) -> None:
    """An iteration has its row of metrics."""
    if (display := current()) is not None:
        display.board.add_row(row)
        display.send("iteration", **row)
        display.refresh()


def evaluated(on_curve: Scores | None, drawn: int, /, **facts: Any) -> None:
    """An evaluation is done; `on_curve` if it belongs to the curve of the run, `drawn`: images of this process.

    `facts` has its `seconds`.
    """
    if (display := current()) is not None:
        display.board.add_evaluation(drawn, facts["seconds"])
        if on_curve is not None:
            display.board.scores.append(on_curve)
        display.send("evaluation", **facts)


def saved(iteration: int, folder: object) -> None:
    """A checkpoint is in place."""
    if (display := current()) is not None:
        display.send("saved", iteration=iteration, folder=str(folder))


def leave() -> None:
    """Take the display away, before the process ends at once."""
    if (display := current()) is not None:
        display.clear()


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def _encodable(text: str, stream: TextIO) -> str:
    """The text with ? for what the stream cannot write or a terminal would obey."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    try:
        return plain.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii")
    except LookupError:
        return plain.encode("ascii", "replace").decode("ascii")


def _size(stream: TextIO) -> tuple[int, int]:
    """(columns, rows) of a terminal, whose size may change."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = shutil.get_terminal_size()
    return columns or 80, rows or 24
