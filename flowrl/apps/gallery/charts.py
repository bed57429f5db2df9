"""Charts of a report and of a comparison as inline SVG, without a plotting library: curves, points, intervals.

Coordinates are SVG user units (px at the natural size); the page scales a chart to its column. The style sheet gives
the classes `s0`, `s1`, ... their colours, for light and dark.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from flowrl.apps.gallery.rendering import macros
from flowrl.apps.gallery.ticks import compact, nice_ticks, tick_labels

COLORS = 6
"""Number of series colours in the style sheet; further series repeat them."""
MAX_POINTS = 400
SMOOTH_FROM = 40
"""Least number of points of a curve that is smoothed, by a moving mean over a twentieth of them."""
_DOTS = 40
"""Most points of a run's curve in a comparison that are dots too."""
_TEMPLATE = "charts.svg.j2"


@dataclass(frozen=True, slots=True)
class Style:
    """Look of a recipe: one of `COLORS` colours; every further round of them another dash and marker."""

    number: int

    @property
    def color(self) -> str:
        return f"s{self.number % COLORS}"

    @property
    def classes(self) -> str:
        return f"{self.color} d{self.number // COLORS % 3}"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: `y` [N] over `x` [N], ascending; NaN breaks the line."""

    label: str
    x: np.ndarray
    y: np.ndarray
    markers: bool = False
    """Whether points are drawn as dots on a thin line and never smoothed, for sparse measurements."""
    style: Style | None = None
    """Look of a run in a comparison, whose legend names all runs; None: by its place, and named under the chart."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run at a cost, with the interval of its result; NaN bounds: none."""

    label: str
    style: Style
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity of the horizontal axis, in the units of the data times `scale`."""

    name: str = ""
    """Label under the axis, with the unit; "": iterations of one run, on a smaller chart."""
    scale: float = 1.0

    def text(self, x: float) -> str:
        if not self.name:
            return f"iteration {x:.0f}"
        value = x * self.scale
        return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 or value == int(value) else f"{value:.3g}"

    def ticks(self, low: float, high: float) -> list[tuple[float, str]]:
        """(place in the units of the data, label); none outside the data, which would extend the axis."""
        ticks = nice_ticks(low * self.scale, high * self.scale, 5)
        if not self.name:
            return [(tick, f"{int(tick)}") for tick in ticks if low <= tick <= high and tick == int(tick)]
        found = [(tick / self.scale, label) for tick, label in zip(ticks, compact(ticks), strict=True)]
        return [(x, label) for x, label in found if low - 1e-9 <= x <= high * (1 + 1e-9)]


ITERATIONS = Axis()


@dataclass(frozen=True, slots=True)
class _Frame:
    """Axes of a chart."""

    axis: Axis
    percent: bool
    x_low: float
    x_high: float
    ticks: list[float]

    @classmethod
    def around(cls, axis: Axis, x: Sequence[float], y: Iterable[np.ndarray | float], *, percent: bool) -> "_Frame":
        """Axes from the least to the largest `x` and around all finite `y`."""
        low, high, values = min(x), max(x), np.concatenate([np.ravel(each) for each in y])
        values = values[np.isfinite(values)]
        ticks = nice_ticks(float(values.min()), float(values.max()))
        return cls(axis, percent, low, high if high > low else low + 1, ticks)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return (460, 250) if self.axis.name else (360, 196)

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of what lies between the axes."""
        width, height = self.size
        return (54, 12, width - 16, height - 40) if self.axis.name else (50, 12, width - 10, height - 24)

    def px(self, x: np.ndarray | float) -> np.ndarray:
        left, _, right, _ = self.box
        return left + (np.asarray(x, float) - self.x_low) / (self.x_high - self.x_low) * (right - left)

    def py(self, y: np.ndarray | float) -> np.ndarray:
        _, top, _, bottom = self.box
        return top + (self.ticks[-1] - np.asarray(y, float)) / (self.ticks[-1] - self.ticks[0]) * (bottom - top)

    def value(self, y: float) -> str:
        return f"{100 * y:.1f} %" if self.percent else f"{y:.4g}" if self.axis.name else f"{y:.6g}"

    @property
    def rows(self) -> list[tuple[float, str]]:
        """(y, label) of each line of the grid."""
        labels = tick_labels([100 * tick for tick in self.ticks] if self.percent else self.ticks)
        return [(float(self.py(tick)), label) for tick, label in zip(self.ticks, labels, strict=True)]

    @property
    def columns(self) -> list[tuple[float, str]]:
        """(x, label) of each number below."""
        return [(float(self.px(x)), label) for x, label in self.axis.ticks(self.x_low, self.x_high)]

    def readout(self, found: Sequence[tuple[float, str]]) -> str:
        """JSON of (x in the units of the data, text), which the page shows under the pointer."""
        units = self.px(np.asarray([x for x, _ in found])).round(1).tolist()
        return json.dumps([[unit, text] for unit, (_, text) in zip(units, found, strict=True)])


def smooth(y: np.ndarray) -> np.ndarray:
    """Centred moving mean of `y` [N] that skips NaN; the window shrinks at both ends."""
    half = max(1, len(y) // 40)
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(y))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    total = counts[high] - counts[low]
    return np.where(total > 0, (sums[high] - sums[low]) / np.maximum(total, 1), np.nan)


def thin(y: np.ndarray, limit: int) -> np.ndarray:
    """Places of the points of a curve that are drawn, ascending: all up to `limit`, of more the extremes.

    The curve is cut into pieces of equal length; of each the first and last place, its lowest and its highest value
    stay, and a place without a value where it has one, so that a gap stays a gap. So the drawn line covers in every
    piece what the whole one covers. The values are [N], NaN: none; `limit` is at least 10, and a curve with gaps may
    have a quarter more.
    """
    if len(y) <= limit:
        return np.arange(len(y))
    length = -(-len(y) // (limit // 4))
    starts = np.arange(0, len(y), length)
    # The last piece is filled up with its last value, whose first place counts.
    pieces = np.concatenate([y, np.full(len(starts) * length - len(y), y[-1])]).reshape(len(starts), length)
    known = np.isfinite(pieces)
    low = np.where(known, pieces, np.inf).argmin(1)
    high = np.where(known, pieces, -np.inf).argmax(1)
    gap = (~known).argmax(1)  # 0, the first place, where there is none
    places = np.concatenate([starts, starts + length - 1, starts + low, starts + high, starts + gap])
    return np.unique(np.minimum(places, len(y) - 1))


def line_chart(
    series: Sequence[Series],
    axis: Axis = ITERATIONS,
    *,
    x_range: tuple[float, float] | None = None,
    baseline: float | None = None,
    percent: bool = False,
) -> Markup:
    """A chart of one or more curves over one quantity, or an empty string without any finite value.

    Two or more curves without a style get a legend. `x_range`: first and last value of the axis; None: those of the
    curves. `baseline`: level of the base model, a dashed line. `percent`: values are shares in [0, 1], labelled in per
    cent.
    """
    series = [s for s in series if np.isfinite(s.y).any()]
    if not series:
        return Markup("")
    shown = [s if s.markers or len(s.y) < SMOOTH_FROM else Series(s.label, s.x, smooth(s.y)) for s in series]
    levels = [] if baseline is None else [baseline]
    ends = x_range or [float(end) for s in series for end in (s.x[0], s.x[-1])]
    frame = _Frame.around(axis, ends, [*(s.y for s in shown), *levels], percent=percent)
    drawn = []
    for index, (raw, curve) in enumerate(zip(series, shown, strict=True)):
        known = np.isfinite(curve.y)
        dotted = curve.markers and (curve.style is None or known.sum() <= _DOTS)
        drawn.append(
            {
                "look": curve.style.classes if curve.style else f"s{index % COLORS}",
                "lines": [*([] if curve is raw else [("raw", _line(frame, raw))]), ("curve", _line(frame, curve))],
                "dots": list(zip(frame.px(curve.x[known]), frame.py(curve.y[known]), strict=True)) if dotted else [],
                "radius": 2.6 if curve.style else 3,
            }
        )
    known = [s.y[np.isfinite(s.y)] for s in series]
    ways = [f"from {frame.value(float(y[0]))} to {frame.value(float(y[-1]))}" for y in known]
    label = "; ".join(f"{s.label} {way}" for s, way in zip(series, ways, strict=True))
    level = None if baseline is None else float(frame.py(baseline))
    named = [] if len(series) == 1 or series[0].style else [(f"s{i % COLORS}", s.label) for i, s in enumerate(series)]
    return macros(_TEMPLATE).curves(frame, label, frame.readout(_readout(series, frame)), level, drawn, named)


def points(marks: Sequence[Point], axis: Axis, *, percent: bool, sign: int) -> Markup:
    """Results over costs, the undominated ones joined; `sign` 1: higher is better. Empty below two points."""
    marks = [mark for mark in marks if math.isfinite(mark.x) and math.isfinite(mark.y)]
    if len(marks) < 2:
        return Markup("")
    levels = [level for mark in marks for level in (mark.y, mark.low, mark.high)]
    frame = _Frame.around(axis, [0.0, *(mark.x for mark in marks)], levels, percent=percent)
    best = front(marks, sign)
    way = "L".join(f"{float(frame.px(m.x)):.1f} {float(frame.py(m.y)):.1f}" for m in best) if len(best) > 1 else ""
    placed = [(m.style, float(frame.px(m.x)), *(float(frame.py(y)) for y in (m.y, m.low, m.high))) for m in marks]
    texts = [(m.x, f"{m.label}: {frame.value(m.y)} at {axis.text(m.x)}") for m in sorted(marks, key=lambda m: m.x)]
    label = "; ".join(text for _, text in texts)
    return macros(_TEMPLATE).points(frame, label, frame.readout(texts), way, placed)


def front(marks: Sequence[Point], sign: int) -> list[Point]:
    """Points that no other one beats in both: cheaper or as cheap, and better. By rising cost."""
    result: list[Point] = []
    for mark in sorted(marks, key=lambda m: (m.x, -sign * m.y)):
        if not result or sign * mark.y > sign * result[-1].y:
            result.append(mark)
    return result


def legend(entries: Sequence[tuple[str, Style]]) -> Markup:
    """Names of a comparison with their colours and markers."""
    return macros(_TEMPLATE).legend(entries)


def interval_plot(
    rows: Sequence[tuple[str, float, float, float]], *, domain: tuple[float, float] | None = None, zero: bool = False
) -> Markup:
    """Means with their intervals on one axis, one row each, for a table cell.

    Rows are (class, mean, low, high); with a NaN bound the mean alone is drawn. `domain`: ends of the axis; None: those
    of the rows. `zero`: whether 0 is on the axis, with a line.
    """
    rows = [row for row in rows if math.isfinite(row[1])]
    if not rows:
        return Markup("")
    width, pitch, pad = 150, 11, 7
    values = [v for row in rows for v in row[1:] if math.isfinite(v)] + ([0.0] if zero else [])
    low, high = domain or (min(values), max(values))
    span = (high - low) or 1.0

    def px(value: float) -> float:
        return pad + (value - low) / span * (width - 2 * pad)

    places = [(name, 2 + pitch * (i + 0.5), *map(px, bounds)) for i, (name, *bounds) in enumerate(rows)]
    return macros(_TEMPLATE).intervals(places, px(0) if zero else None, width, pitch * len(rows) + 4, pad)


def _line(frame: _Frame, curve: Series) -> str:
    """Commands of a polyline that is interrupted at each NaN; a single point between two of them becomes a dot."""
    kept = thin(curve.y, MAX_POINTS)
    commands, pen_down = [], False
    for x, y in zip(frame.px(curve.x[kept]), frame.py(curve.y[kept]), strict=True):
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}" + ("" if pen_down else "h0"))
        pen_down = math.isfinite(y)
    return "".join(commands)


def _readout(series: Sequence[Series], frame: _Frame) -> list[tuple[float, str]]:
    """(x, text) of each x with a value; one curve that stands under its title needs no name."""
    known: dict[float, list[str]] = {}
    for s in series:
        name = f"{s.label} " if len(series) > 1 or s.style else ""
        kept = thin(s.y, MAX_POINTS)
        for x, y in zip(s.x[kept], s.y[kept], strict=True):
            if math.isfinite(y):
                known.setdefault(float(x), []).append(name + frame.value(float(y)))
    return [(x, f"{frame.axis.text(x)}: {', '.join(known[x])}") for x in sorted(known)]
