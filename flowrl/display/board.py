"""What a display says: the state of a run, and its text. Pure: times are given, nothing is written."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.assets import table
from flowrl.display.units import duration

_WORDS = table(Path(__file__).with_suffix(".yaml"))
HEADLINES: dict[str, str] = _WORDS["headlines"]
"""Keys of a metrics row and their words; the first that a row has stands for it."""
PHASES: dict[str, str] = _WORDS["phases"]
"""Names of phases (`phases.phase`, `Timer.phase`) and their words; "": the work around it has them."""
ARROWS, ASCII_ARROWS = "\u2191\u2193\u2192", "^v="
"""Up, down, as before; where a terminal has none of them: ASCII."""
_WINDOW = 5
"""Iterations whose mean is compared with that of as many before them."""


@dataclass(eq=False, slots=True)
class Work:
    """Something that takes time, with a count where there is one."""

    name: str
    """Words; "" is not shown."""
    started: float
    """In s, of a clock that does not go back."""
    total: int = 0
    """Samples or the like; 0: not counted."""
    done: int = 0
    said: float | None = None
    """When a line last said that it goes on; None: never."""

    def left(self, now: float) -> float | None:
        """Seconds to its end."""
        return remaining(self.done, self.total, now - self.started)


@dataclass(frozen=True, slots=True)
class Scores:
    """An evaluation's means."""

    alike: tuple[Any, ...]
    """Evaluations that may be compared have the same."""
    name: str
    """Of the metric with its prompts, such as "held-out brightness"."""
    mean: float


@dataclass(slots=True)
class Board:
    """State of what is displayed."""

    total: int = 0
    """Iterations of the run; 0: no run."""
    start: int = 0
    """Iterations that were finished when the run was resumed."""
    began: float | None = None
    """When the first iteration of this call began."""
    iteration: int = 0
    """The last finished one."""
    works: list[Work] = field(default_factory=list)
    """Those under way, the outermost first."""
    headline: str = "reward"
    values: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _WINDOW))
    """Of the headline, by iteration."""
    scores: list[Scores] = field(default_factory=list)
    coming: Callable[[int], int] = lambda iteration: 0
    """Images of the evaluations that follow an iteration."""
    drawn: int = 0
    """Images of the evaluations that were made in this call."""
    seconds: float = 0.0
    """That those took, their preview prompts among them."""
    inside: float = 0.0
    """Those of them since `began`."""

    def current(self, now: float) -> Work | None:
        """The innermost work that is worth showing: of those without a count, one that lasts."""
        named = [work for work in tuple(self.works) if work.name]
        long = [work for work in named if work.total or now - work.started > 0.3]
        return (long or named or [None])[-1]

    def add_work(self, work: Work) -> None:
        """Begin a work."""
        self.works.append(work)
        if self.total and self.began is None and work.name == PHASES["iteration"]:
            self.began = work.started

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Note the metrics row of a finished iteration."""
        self.iteration = int(row["iteration"])
        key = next((name for name in HEADLINES if name in row), None)
        if key is not None:
            self.headline = HEADLINES[key]
            self.values.append(float(row[key]))

    def add_evaluation(self, scores: Scores | None, drawn: int, seconds: float) -> None:
        """Note an evaluation that is done; `scores` if it belongs to the curve of the run."""
        self.drawn, self.seconds = self.drawn + drawn, self.seconds + seconds
        self.inside += 0.0 if self.began is None else seconds
        self.scores += [] if scores is None else [scores]

    def run_left(self, now: float) -> float | None:
        """Seconds to the end of the run, its coming evaluations included as far as their pace is known.

        Iterations go on at their mean pace since the first one of this call, without evaluations.
        """
        if self.began is None or self.iteration == self.total:
            return None
        under_way = sum(now - work.started for work in tuple(self.works) if work.name == PHASES["evaluation"])
        spent = now - self.began - self.inside - under_way
        left = remaining(self.iteration - self.start, self.total - self.start, max(spent, 0.0))
        coming = self.evaluations_left()
        return left if left is None or coming is None else left + max(coming - under_way, 0.0)

    def evaluations_left(self) -> float | None:
        """Seconds of the evaluations to come; None: none was made in this call, so `run_left` is without them."""
        coming = self.coming(self.iteration)
        return self.seconds / self.drawn * coming if self.drawn else None if coming else 0.0


def remaining(done: int, total: int, seconds: float) -> float | None:
    """Seconds that the rest takes at the pace so far; None before anything is done.

    >>> remaining(2, 8, 10.0), remaining(0, 8, 10.0)
    (30.0, None)
    """
    return seconds / done * max(total - done, 0) if done > 0 else None


def row_trend(values: Sequence[float], window: int = _WINDOW) -> tuple[float, float | None] | None:
    """(mean of the last `window` values, its change against that of as many before them), of fewer while there are few.

    >>> row_trend([1.0, 2.0, 3.0, 5.0])
    (4.0, 2.5)
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    size = max(1, min(window, len(finite) // 2))
    last, before = finite[-size:], finite[-2 * size : -size]
    mean = sum(last) / len(last)
    return mean, mean - sum(before) / len(before) if before else None


# ---- text


def trend_text(name: str, last: float, change: float | None, arrows: str = ASCII_ARROWS) -> str:
    """A number with its change; None: nothing came before.

    >>> trend_text("reward", 0.5, 0.0125), trend_text("reward", 0.5, None)
    ('reward 0.500 ^ +0.013', 'reward 0.500')
    """
    if change is None:
        return f"{name} {last:.3f}"
    shown = f"{change:+.3f}"
    arrow = arrows[2] if float(shown) == 0 else arrows[0] if change > 0 else arrows[1]
    return f"{name} {last:.3f} {arrow} {shown}"


def scores_text(scores: Sequence[Scores], arrows: str = ASCII_ARROWS) -> str:
    """The last evaluation against the one before, and against the first; those of other prompts are left out.

    >>> scores_text([Scores((4,), "held-out x", mean) for mean in (1.0, 3.0, 2.5)])
    'held-out x 2.500 v -0.500 (since the first +1.500)'
    """
    means = [each.mean for each in scores if each.alike == scores[-1].alike]
    text = trend_text(scores[-1].name, means[-1], means[-1] - means[-2] if len(means) > 1 else None, arrows)
    return text if len(means) < 3 else f"{text} (since the first {means[-1] - means[0]:+.3f})"


def bar(done: int, total: int) -> str:
    """A bar in ASCII.

    >>> bar(1, 4)
    '[#####...............]'
    """
    return f"[{'#' * (20 * min(done, total) // total):.<20}]"


def work_text(work: Work, now: float, *, drawn: bool = False) -> str:
    """A work with its count, the seconds so far and those to come; `drawn`: as a line with a bar.

    >>> work_text(Work("sampling", 0.0, 64, 16), 10.0)
    'sampling 16/64, 10 s, 30 s left'
    """
    seconds, left = duration(now - work.started), work.left(now)
    if not work.total:
        return f"{work.name}{'  ' if drawn else ', '}{seconds}"
    rest = "" if left is None or work.done >= work.total else f"{duration(left)} left"
    count = f"{work.done}/{work.total}"
    if drawn:
        return f"{work.name} {bar(work.done, work.total)} {count}  {rest or seconds}"
    return ", ".join(filter(None, (f"{work.name} {count}", seconds, rest)))


def waiting_line(board: Board, work: Work, now: float) -> str:
    """A plain line that says what is waited for."""
    text = work_text(work, now)
    inside = board.works and board.works[0].name == PHASES["iteration"] and not text.startswith("iteration")
    return f"iteration {board.iteration + 1}: {text}" if inside else text


def live_lines(board: Board, now: float, width: int, arrows: str = ASCII_ARROWS) -> list[str]:
    """The lines of a terminal, each at most `width` long."""
    lines: list[str] = []
    if board.total:
        left, coming, began = board.run_left(now), board.evaluations_left(), board.began
        if left is None:
            rest = "" if began is None or now <= began else duration(now - began)
        elif coming is None:
            rest = f"{duration(left)} left without evaluations"
        else:
            rest = f"{duration(left)} left" + (f", {duration(coming)} of it evaluations" if round(coming) else "")
        head = f"iteration {board.iteration}/{board.total} {bar(board.iteration, board.total)}"
        lines.append(f"{head}  {rest}".rstrip())
        row = row_trend(board.values)
        numbers = [] if row is None else [trend_text(board.headline, *row, arrows)]
        numbers += [scores_text(board.scores, arrows)] if board.scores else []
        together = "   ".join(numbers)
        lines += numbers if len(together) > width else filter(None, [together])
    work = board.current(now)
    if work is not None:
        lines.append(work_text(work, now, drawn=True))
    return [line[:width] for line in lines]
