"""What a display says: the state of a run, and its text. Pure: times are given, nothing is written."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HEADLINES = {"reward/total_mean": "reward", "policy/implicit_accuracy": "agreement", "policy/loss": "loss"}
"""Keys of a metrics row and their words; the first that a row has stands for it."""
ITERATION = "iteration"
PHASES = {
    ITERATION: "training",
    "loading": "loading",
    "evaluation": "evaluating",
    "text": "encoding the prompts",
    "rollout": "",
    "decode": "decoding the images",
    "reward": "scoring",
    "maps": "computing saliency maps",
    "explore": "exploring",
    "pictures": "reading the images",
    "update": "updating",
}
"""Names of phases (`phases.phase`, `Timer.phase`) and their words; "": the work around it has them."""
ARROWS = "\u2191\u2193\u2192"
"""Up, down, as before; where a terminal has none of them: ASCII."""
ASCII_ARROWS = "^v="
_WINDOW = 5
"""Iterations whose mean is compared with that of as many before them."""
_BRIEF_S = 0.3
"""Seconds from which an inner phase without a count is shown."""
_BAR = 20


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
        """Seconds to the end at the pace so far; None before anything is done."""
        return remaining(self.done, self.total, now - self.started)


@dataclass(frozen=True, slots=True)
class Trend:
    """A number and its change."""

    last: float
    change: float | None
    """Against what came before; None: nothing did."""


@dataclass(frozen=True, slots=True)
class Scores:
    """An evaluation's means."""

    alike: tuple[Any, ...]
    """Evaluations that may be compared have the same."""
    name: str
    """Of the metric with its prompts, such as "held-out brightness"."""
    mean: float


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a run: which ones are to come, and how long those of this call took.

    Images are those that this process draws.
    """

    every: int = 0
    """Iterations between two during training; 0: none."""
    during: int = 0
    """Images of one during training."""
    final: int = 0
    """Images of the last one, after the last iteration."""
    drawn: int = 0
    seconds: float = 0.0
    """For `drawn` images, the preview prompts of those evaluations among them."""
    inside: float = 0.0
    """Seconds of those after the first iteration of this call began."""

    def coming(self, iteration: int, total: int) -> int:
        """Images that are still to be drawn after an iteration of `total`.

        >>> Evaluations(every=2, during=8, final=16).coming(1, 6)
        32
        """
        many = (total - 1) // self.every - iteration // self.every if self.every else 0
        return max(many, 0) * self.during + self.final

    def left(self, iteration: int, total: int) -> float | None:
        """Seconds that they take at the pace of those that were made; None: none was made in this call."""
        coming = self.coming(iteration, total)
        return self.seconds / self.drawn * coming if self.drawn else None if coming else 0.0


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
    evaluations: Evaluations = field(default_factory=Evaluations)

    def current(self, now: float) -> Work | None:
        """The innermost work that is worth showing."""
        named = [work for work in tuple(self.works) if work.name]
        long = [work for work in named if work.total or now - work.started > _BRIEF_S]
        return (long or named or [None])[-1]

    @property
    def iterating(self) -> bool:
        """The run is among its iterations, each of which has a line of its own at its end."""
        return self.began is not None and self.iteration < self.total

    def add_work(self, work: Work) -> None:
        """Begin a work."""
        self.works.append(work)
        if self.total and self.began is None and work.name == PHASES[ITERATION]:
            self.began = work.started

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Note the metrics row of a finished iteration."""
        self.iteration = int(row["iteration"])
        key = next((name for name in HEADLINES if name in row), None)
        if key is not None:
            self.headline = HEADLINES[key]
            self.values.append(float(row[key]))

    def add_evaluation(self, drawn: int, seconds: float) -> None:
        """Note an evaluation that is done: images that this process drew, and the seconds it took."""
        known = self.evaluations
        known.drawn, known.seconds = known.drawn + drawn, known.seconds + seconds
        known.inside += 0.0 if self.began is None else seconds

    def run_left(self, now: float) -> float | None:
        """Seconds to the end of the run, its coming evaluations included as far as their pace is known.

        Iterations go on at their mean pace since the first one of this call, without evaluations.
        """
        if self.began is None or self.iteration == self.total:
            return None
        under_way = sum(now - work.started for work in tuple(self.works) if work.name == PHASES["evaluation"])
        spent = now - self.began - self.evaluations.inside - under_way
        left = remaining(self.iteration - self.start, self.total - self.start, max(spent, 0.0))
        coming = self.evaluations_left()
        return left if left is None or coming is None else left + max(coming - under_way, 0.0)

    def evaluations_left(self) -> float | None:
        """Seconds of the evaluations to come; None: their pace is not known yet, so `run_left` is without them."""
        return self.evaluations.left(self.iteration, self.total)


# ---- numbers


def remaining(done: int, total: int, seconds: float) -> float | None:
    """Seconds that the rest takes at the pace so far; None before anything is done.

    >>> remaining(2, 8, 10.0), remaining(0, 8, 10.0)
    (30.0, None)
    """
    return seconds / done * max(total - done, 0) if done > 0 else None


def row_trend(values: Sequence[float], window: int = _WINDOW) -> Trend | None:
    """Mean of the last `window` values against that of as many before them, of fewer while there are few.

    >>> row_trend([1.0, 2.0, 3.0, 5.0])
    Trend(last=4.0, change=2.5)
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    size = max(1, min(window, len(finite) // 2))
    last, before = finite[-size:], finite[-2 * size : -size]
    mean = sum(last) / len(last)
    return Trend(mean, mean - sum(before) / len(before) if before else None)


def score_trend(scores: Sequence[Scores]) -> tuple[Trend, Trend] | None:
    """The last evaluation against the one before, and against the first; those of other prompts are left out.

    >>> a, b, c = (Scores((4,), "held-out x", mean) for mean in (1.0, 3.0, 2.5))
    >>> score_trend([a, b, c])
    (Trend(last=2.5, change=-0.5), Trend(last=2.5, change=1.5))
    """
    alike = [each.mean for each in scores if each.alike == scores[-1].alike]
    if not alike:
        return None
    last, former = alike[-1], alike[:-1]
    return Trend(last, last - former[-1] if former else None), Trend(last, last - former[0] if former else None)


# ---- text


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(3.4), duration(125), duration(7260)
    ('3 s', '2 min 5 s', '2 h 1 min')
    """
    whole = round(max(seconds, 0.0))
    minutes, hours = divmod(whole, 60)[0], whole // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def trend_text(name: str, trend: Trend, arrows: str = ASCII_ARROWS) -> str:
    """A number with its change.

    >>> trend_text("reward", Trend(0.5, 0.0125)), trend_text("reward", Trend(0.5, None))
    ('reward 0.500 ^ +0.013', 'reward 0.500')
    """
    if trend.change is None:
        return f"{name} {trend.last:.3f}"
    change = f"{trend.change:+.3f}"
    arrow = arrows[2] if float(change) == 0 else arrows[0] if trend.change > 0 else arrows[1]
    return f"{name} {trend.last:.3f} {arrow} {change}"


def bar_text(done: int, total: int, width: int = _BAR) -> str:
    """A bar in ASCII.

    >>> bar_text(1, 4, 8)
    '[##......]'
    """
    filled = min(width, width * done // total) if total else 0
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def work_text(work: Work, now: float, *, bar: bool = False) -> str:
    """A work with its count, the seconds so far and those to come.

    >>> work_text(Work("sampling", 0.0, 64, 16), 10.0)
    'sampling 16/64, 10 s, 30 s left'
    """
    seconds, left = duration(now - work.started), work.left(now)
    if not work.total:
        return f"{work.name}  {seconds}" if bar else f"{work.name}, {seconds}"
    rest = "" if left is None or work.done >= work.total else f"{duration(left)} left"
    count = f"{work.done}/{work.total}"
    if bar:
        return "  ".join(filter(None, (f"{work.name} {bar_text(work.done, work.total)} {count}", rest or seconds)))
    return ", ".join(filter(None, (f"{work.name} {count}", seconds, rest)))


def waiting_line(board: Board, work: Work, now: float) -> str:
    """A plain line that says what is waited for."""
    text = work_text(work, now)
    if not (board.works and board.works[0].name == PHASES[ITERATION]) or text.startswith(ITERATION):
        return text
    return f"iteration {board.iteration + 1}: {text}"


def live_lines(board: Board, now: float, width: int, arrows: str = ASCII_ARROWS) -> list[str]:
    """The lines of a terminal, each at most `width` long."""
    lines: list[str] = []
    if board.total:
        left, since = board.run_left(now), now if board.began is None else board.began
        rest = _left_text(board, left) if left is not None else duration(now - since) if now > since else ""
        bar = bar_text(board.iteration, board.total)
        lines.append(f"iteration {board.iteration}/{board.total} {bar}  {rest}".rstrip())
        numbers = _numbers(board, arrows)
        together = "   ".join(numbers)
        lines += numbers if len(together) > width else filter(None, [together])
    work = board.current(now)
    if work is not None:
        lines.append(work_text(work, now, bar=True))
    return [line[:width] for line in lines]


def _left_text(board: Board, left: float) -> str:
    """Seconds that are left, and what of them evaluations take.

    >>> _left_text(Board(10, evaluations=Evaluations(final=8, drawn=4, seconds=30.0)), 125.0)
    '2 min 5 s left, 1 min 0 s of it evaluations'
    """
    coming = board.evaluations_left()
    if coming is None:
        return f"{duration(left)} left without evaluations"
    return f"{duration(left)} left" + (f", {duration(coming)} of it evaluations" if round(coming) else "")


def _numbers(board: Board, arrows: str) -> list[str]:
    """Reward and held-out metric with their trends."""
    parts, row, scores = list[str](), row_trend(board.values), score_trend(board.scores)
    if row is not None:
        parts.append(trend_text(board.headline, row, arrows))
    if scores is not None:
        last, first = scores
        text = trend_text(board.scores[-1].name, last, arrows)
        alike = sum(each.alike == board.scores[-1].alike for each in board.scores)
        parts.append(text if alike < 3 or first.change is None else f"{text} (since the first {first.change:+.3f})")
    return parts
