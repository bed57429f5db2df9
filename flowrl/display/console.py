"""Messages to the screen and train.log."""

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from flowrl.core.files import writing
from flowrl.display import display

log = logging.getLogger("flowrl")
journal = logging.getLogger("flowrl.journal")
"""Messages for train.log alone; the screen shows the same in another way."""

DEBUG = "FLOWRL_DEBUG"
"""Environment variable that makes the screen show tracebacks too; set by `flowrl --debug`."""


verdict = logging.getLogger("flowrl.verdict")
"""Messages about how a run ended, which --quiet shows too."""


class Screen(logging.StreamHandler[TextIO]):
    """The output stream as the display has it: all lines, warnings and the verdict alone, or warnings as JSON.

    Once nobody reads it (`flowrl train ... | head`), one line on the error stream says so, and the run goes on.
    """

    lost = False

    def __init__(self, *, main: bool, rank: int = 0) -> None:
        super().__init__(sys.stdout)
        self.mode = display.current().mode
        self.rank = rank
        self.setFormatter(logging.Formatter("%(message)s"))
        self.setLevel(logging.DEBUG if DEBUG in os.environ else logging.INFO if main else logging.WARNING)
        self.addFilter(self._shown)

    def _shown(self, record: logging.LogRecord) -> bool:
        chosen = record.levelno >= logging.WARNING or (record.name == verdict.name and self.mode == "quiet")
        return record.name != journal.name and (chosen or self.mode == "auto")

    def emit(self, record: logging.LogRecord) -> None:
        opened = display.current()
        if self.mode == "json" and opened is not display.NONE:
            opened.send("warning", level=record.levelname.lower(), process=self.rank, text=self.format(record))
        elif not self.lost:
            super().emit(record)
        opened.spoke = time.monotonic()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self.lost = True
        with suppress(OSError, ValueError):
            # What is left in its buffer must not fail at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        with suppress(OSError):
            print(f"nobody reads the output any more ({error.strerror}): the run goes on", file=sys.stderr)


class LogFile(logging.FileHandler):
    """train.log; if it cannot be written, one line on the error stream instead of a traceback for every message."""

    lost = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # uvicorn's logging.config closes all handlers; the next message opens the file again
            self.handleError(record)

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


def close_log_file() -> None:
    """End train.log: what is logged after a run goes to the screen alone."""
    for handler in list(log.handlers):
        if isinstance(handler, LogFile):
            log.removeHandler(handler)
            handler.close()


def set_up_logging(file: Path | None, *, main: bool, rank: int = 0) -> None:
    """Messages of the first process and warnings of the others to the screen; all with tracebacks to `file`.

    INFO messages, equal on all processes, are in the file once.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(Screen(main=main, rank=rank))
    if file is not None:
        # Several processes append to one file, a whole line at a time.
        with writing(file):
            stream = LogFile(file, encoding="utf-8", delay=not main)
        stream.setFormatter(_Stamped("" if main else f"process {rank}: "))
        stream.addFilter(lambda record: main or record.levelno != logging.INFO)
        log.addHandler(stream)
