"""Named scalars: sums over microbatches and processes, metrics.jsonl, the line and the bar one sees."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.batches import LossOutput
from flowrl.checkpoint import write_atomically
from flowrl.files import read_rows, writing
from flowrl.phases import phase

log = logging.getLogger("flowrl")
journal = logging.getLogger("flowrl.journal")
"""For train.log alone: what the screen is told otherwise."""
DEBUG = "FLOWRL_DEBUG"
"""Set in the environment, the screen shows tracebacks too; `flowrl --debug` sets it."""


class Sums:
    """Sums and counts that add up over microbatches and processes, then divide once."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        self.values[name] += value
        self.counts[name] += count

    def add_loss(self, output: LossOutput, size: int, steps: Tensor | None = None) -> None:
        """Metrics of a batch of `size` rows, and its per-step values by denoising step, steps [size]."""
        for name, value in output.metrics.items():
            self.add(name, float(value), size)
        for name, values in output.per_step.items():
            assert steps is not None
            for k in steps.unique().tolist():
                chosen = values[steps == k]
                self.add(f"{name}/step{k:02d}", float(chosen.sum()), len(chosen))

    def merge(self, others: Iterable[Sums]) -> Sums:
        """A new table with the sums of all."""
        total = Sums()
        for other in others:
            for name, value in other.values.items():
                total.add(name, value, other.counts[name])
        return total

    def means(self) -> dict[str, float]:
        return {name: value / self.counts[name] for name, value in self.values.items() if self.counts[name]}


class MetricsFile:
    """`metrics.jsonl`: one object per iteration, appended and on the disk at once; NaN is written as null."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, row: dict[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with writing(self.file), self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(clean) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Complete rows; a torn last line of a killed run is dropped.

        Raises:
            ConfigError: another line is damaged.
        """
        return read_rows(self.file)[0]

    def truncate(self, iteration: int) -> None:
        """Drop rows past a checkpoint."""
        kept = [row for row in self.rows() if row["iteration"] <= iteration]
        write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in kept))


class Timer:
    """Seconds by phase of one iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `phases.phase`, too."""
        started = time.perf_counter()
        try:
            with phase(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - started


class Progress:
    """A bar with rate and remaining time on a terminal; quiet elsewhere, and on all processes but the first."""

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
    """train.log; where it cannot be written the error stream says so once, in place of a traceback for each line."""

    lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.lost:
            self.lost = True
            print(f"{self.baseFilename} cannot be written ({error.strerror}): lines are missing there", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # the lines that are still held back; it was told when they came
            super().close()


class _Stamped(logging.Formatter):
    """Time and level on every line, those of a traceback among them."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {self.process}"
        return "\n".join(head + line for line in super().format(record).splitlines() or [""])


def set_up_logging(file: Path | None, *, main: bool, rank: int = 0) -> None:
    """Messages of the first process to the screen, warnings of the others too; to `file` all, tracebacks included.

    What every process says (INFO) stands in the file once, the first process's.
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
        # Lines of several processes go to the end of one file, each line as a whole.
        with writing(file):
            stream = LogFile(file, encoding="utf-8", delay=not main)
        stream.setFormatter(_Stamped("" if main else f"process {rank}: "))
        stream.addFilter(lambda record: main or record.levelno != logging.INFO)
        log.addHandler(stream)
