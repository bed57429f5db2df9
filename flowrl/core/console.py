"""Messages to the screen and train.log, and the progress bar."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from flowrl.core.files import writing

log = logging.getLogger("flowrl")
journal = logging.getLogger("flowrl.journal")
"""Messages for train.log alone; the screen shows the same in another way."""

DEBUG = "FLOWRL_DEBUG"
"""Environment variable that makes the screen show tracebacks too; set by `flowrl --debug`."""


class Progress:
    """Progress bar with rate and remaining time on a terminal; silent elsewhere, and if `show` is false."""

    def __init__(self, total: int, text: str, *, show: bool) -> None:
        self.total, self.text, self.done, self.started = total, text, 0, time.monotonic()
        self.show = show and total > 0 and sys.stderr.isatty()
        self._shown = 0.0

    def update(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if not self.show or (now - self._shown < 0.1 and self.done < self.total):
            return
        self._shown, spent = now, max(now - self.started, 1e-6)
        rate = self.done / spent
        left = (self.total - self.done) / rate if rate else 0.0
        filled = int(24 * self.done / self.total)
        bar = "#" * filled + "." * (24 - filled)
        sys.stderr.write(f"\r{self.text} [{bar}] {self.done}/{self.total} {rate:.1f}/s {left:.0f} s left \x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        if self.show:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class LogFile(logging.FileHandler):
    """train.log; if it cannot be written, one line on the error stream instead of a traceback for every message."""

    lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.lost:
            self.lost = True
            print(f"{self.baseFilename} cannot be written ({error.strerror}): lines are missing there", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # unwritten lines; handleError has reported them
            super().close()


class _Stamped(logging.Formatter):
    """Time and level on every line, also on those of a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {self.process}"
        return "\n".join(head + line for line in super().format(record).splitlines() or [""])


def set_up_logging(file: Path | None, *, main: bool, rank: int = 0) -> None:
    """Messages of the first process and warnings of the others to the screen; all with tracebacks to `file`.

    INFO messages, equal on all processes, are in the file once.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    screen = logging.StreamHandler(sys.stdout)
    screen.setFormatter(logging.Formatter("%(message)s"))
    screen.setLevel(logging.DEBUG if DEBUG in os.environ else logging.INFO if main else logging.WARNING)
    screen.addFilter(lambda record: record.name != journal.name)
    log.addHandler(screen)
    if file is not None:
        # Several processes append to one file, a whole line at a time.
        with writing(file):
            stream = LogFile(file, encoding="utf-8", delay=not main)
        stream.setFormatter(_Stamped("" if main else f"process {rank}: "))
        stream.addFilter(lambda record: main or record.levelno != logging.INFO)
        log.addHandler(stream)
