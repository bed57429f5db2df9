"""The display of a process: what it is doing, redrawn in a terminal, as plain lines elsewhere, or as JSON.

One display is open at a time (`opened`), in the first process. Whoever works says so with `working`, `Progress` or
`phases.phase`; without a display nothing is shown. Nothing here imports torch.

The lines of a terminal are drawn at the cursor, which then goes back to their beginning and stays visible: whatever is
written next takes their place, whoever writes it, and nothing has to be put right when the process is killed.
"""

import codecs
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, TextIO

from flowrl.core.files import json_ready
from flowrl.display.board import ARROWS, ASCII_ARROWS, PHASES, Board, Work, live_lines, waiting_line

Mode = Literal["auto", "quiet", "json"]
KINDS = ("start", "phase", "iteration", "evaluation", "warning", "saved", "end")
"""Kinds of JSON objects (docs/watching.md)."""
_REDRAW_S, _BEAT_S = 0.1, 0.5
_FIRST_S, _AGAIN_S = 2.0, 30.0
"""Seconds of a wait until a plain line says so, and until the next one does."""


class Above(codecs.StreamWriter):
    """A stream of the terminal, but what is written to it takes the place of the display's lines."""

    def __init__(self, stream: Any, display: "Display") -> None:
        super().__init__(stream)  # whose attributes are handed on
        self.below, self.display = stream, display

    def write(self, object: str) -> int:
        with self.display.lock:
            self.display.clear()
            # Below a line that is not ended, such as another program's bar, nothing is drawn.
            self.display.free = object.endswith("\n") if object else self.display.free
            return self.below.write(object)


class Display:
    """What one process shows.

    The mode "auto" draws where the error stream is a terminal and prints lines elsewhere; "quiet": warnings and the
    verdict alone; "json": one object a line on the output stream, which has nothing else. `main`: this is the first
    process; another shows its warnings alone.
    """

    def __init__(self, mode: Mode = "auto", *, main: bool = True) -> None:
        self.mode, self.main, self.board = mode, main, Board()
        self.out, self.err = sys.stdout, sys.stderr
        self.lock = threading.RLock()
        self.result: dict[str, Any] = {}
        """What the command's object "end" holds."""
        self.free = True
        """The cursor is at the beginning of a line."""
        self.spoke = time.monotonic()
        """When a line was printed."""
        self.terminal = main and mode == "auto" and self.err.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn, self._shown, self._ended = False, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="display", daemon=True)

    def open(self) -> None:
        if self.terminal:
            sys.stderr = Above(self.err, self)
            sys.stdout = Above(self.out, self) if self.out.isatty() else self.out
        elif self.mode == "json":
            sys.stdout = self.err  # what others print is no JSON
        if self.main and self.mode != "quiet":
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        with self.lock:
            self.clear()
            self.terminal = False
        sys.stdout, sys.stderr = self.out, self.err

    # ---- what happens

    def begin(self, work: Work) -> None:
        first = not self.board.works
        self.board.add_work(work)
        if first and not self.board.total:
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

    # ---- drawing

    def clear(self) -> None:
        """Take the lines away; the cursor is where they began."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[J")

    def refresh(self, *, late: bool = False) -> None:
        """Draw, unless that was done a moment ago or another thread is at it; `late`: say what takes long."""
        now = time.monotonic()
        if not (self.terminal or late) or now - self._shown < _REDRAW_S or not self.lock.acquire(blocking=False):
            return
        try:
            self._shown = now
            if not self.terminal:
                self._say(now)
            elif self.free:
                self._draw(now)
        finally:
            self.lock.release()

    def _draw(self, now: float) -> None:
        try:
            width, height = os.get_terminal_size(self.err.fileno())
        except (OSError, ValueError):
            width, height = shutil.get_terminal_size()
        arrows = ARROWS if _encodable(ARROWS, self.err) == ARROWS else ASCII_ARROWS
        lines = live_lines(self.board, now, (width or 80) - 1, arrows)[: max((height or 24) - 1, 1)]
        if not lines:
            return self.clear()
        self._drawn = True
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        self._write("\r" + "\n".join(f"{_encodable(line, self.err)}\x1b[K" for line in lines) + f"\x1b[J{up}\r")

    def _say(self, now: float) -> None:
        """A line about work that takes long: after 2 s, within an iteration after 30 s, and every 30 s."""
        work, board = self.board.current(now), self.board
        if work is None or not self.main or self.mode == "quiet":
            return
        last, first_s = max(self.spoke, work.said or work.started), _BEAT_S if self.mode == "json" else _FIRST_S
        # Each iteration has a line of its own at its end.
        iterating = self.mode == "auto" and board.began is not None and board.iteration < board.total
        if now - last < _AGAIN_S and (work.said is not None or iterating or now - work.started < first_s):
            return
        work.said = self.spoke = now
        self._phase(work, now)
        if self.mode == "auto":
            self._write(_encodable(waiting_line(board, work, now), self.err) + "\n")

    def _phase(self, work: Work, now: float) -> None:
        if self.mode != "json":
            return
        work.said, board = now, self.board
        facts: dict[str, Any] = {"phase": work.name.rpartition(": ")[2], "seconds": round(now - work.started, 1)}
        if work.total:
            facts |= {"done": work.done, "total": work.total, "left_s": work.left(now)}
        if board.total:
            facts |= {"finished": board.iteration, "iterations": board.total}
            facts |= {"run_left_s": board.run_left(now), "evaluations_left_s": board.evaluations_left()}
        self.send("phase", **facts)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone ends no run
            self.err.write(text)
            self.err.flush()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self.refresh(late=True)


NONE = Display(main=False)
"""What is told where no display is open; it shows nothing."""
_open = [NONE]


def current() -> Display:
    """The display that is open; `NONE` if none is."""
    return _open[-1]


def _forked() -> None:
    del _open[1:]  # its thread is the parent's, and its lock may be held


os.register_at_fork(after_in_child=_forked)


@contextmanager
def opened(mode: Mode = "auto", *, main: bool = True) -> Generator[Display]:
    """A display, until the end of the block; inside another one that one."""
    if current() is not NONE:
        yield current()
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
    display, work = current(), Work(PHASES.get(name, name), time.monotonic())
    display.begin(work)
    try:
        yield
    finally:
        display.end(work)


class Progress(ExitStack):
    """A counted work until it is closed, with a bar in a terminal; silent if `show` is false.

    Without a display it opens one in a terminal for itself.
    """

    def __init__(self, total: int, text: str, *, show: bool) -> None:
        super().__init__()
        self.work = Work(text, time.monotonic(), total)
        if show and total > 0:
            if current() is NONE and sys.stderr.isatty():
                self.enter_context(opened())
            current().begin(self.work)
            self.callback(current().end, self.work)

    def update(self, count: int) -> None:
        self.work.done += count
        current().refresh()


# ---- what a run tells


def run_starts(start: int, iterations: int, coming: Callable[[int], int] | None = None, **facts: Any) -> None:
    """A run goes on after the iteration `start`; `coming`: images of the evaluations that follow an iteration."""
    display = current()
    display.board.start = display.board.iteration = start
    display.board.total, display.board.coming = iterations, coming or display.board.coming
    display.send("start", iterations=iterations, finished=start, **facts)


def iteration_done(row: Mapping[str, Any]) -> None:
    """An iteration has its row of metrics."""
    display = current()
    display.board.add_row(row)
    display.send("iteration", **row)
    display.refresh()


def _encodable(text: str, stream: TextIO) -> str:
    """The text with ? for what the stream cannot write or a terminal would obey."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    try:
        return plain.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii")
    except LookupError:
        return plain.encode("ascii", "replace").decode("ascii")
