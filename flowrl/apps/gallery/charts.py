"""Curves and intervals as inline SVG, without a plotting library or a script.

Coordinates are SVG user units (px at the natural size); the page scales a chart to its column. The style sheet gives
the classes `s0`, `s1`, ... their colours, for light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 196
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 12, 24
COLORS = 6
"""Number of series colours in the style sheet; further series repeat them."""

MAX_POINTS = 400
SMOOTH_FROM = 40
"""Least number of points of a curve that is smoothed, by a moving mean over a twentieth of them."""

Scale = Callable[[np.ndarray | float], np.ndarray]
"""Function from data to user units."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: `y` [N] over the iterations `x` [N], ascending; NaN breaks the line."""

    label: str
    x: np.ndarray
    y: np.ndarray
    markers: bool = False
    """Whether points are drawn as dots on a thin line and never smoothed, for sparse measurements."""


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that cover [low, high].

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> nice_ticks(3.0, 3.0)
    [2.0, 3.0, 4.0]
    >>> nice_ticks(1.5, 1.5)
    [0.0, 1.0, 2.0, 3.0]
    >>> nice_ticks(0.0, 0.0)
    [0.0, 1.0]
    """
    if low == high == 0:
        # A count, share or time that never left 0: nothing below it.
        return [0.0, 1.0]
    if high <= low:
        # Round ticks on both sides of a constant curve of any size.
        pad = 10.0 ** math.floor(math.log10(abs(low)))
        return nice_ticks(low - pad, low + pad, 2)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Axis labels with as many decimals as distinguish `ticks`, or in powers of ten if those are too many.

    >>> tick_labels([0.0, 0.25, 0.5])
    ['0.00', '0.25', '0.50']
    >>> tick_labels([0.0, 1e-06, 2e-06])
    ['0', '1e-6', '2e-6']
    >>> tick_labels([1000000.0, 1000500.0, 1001000.0])
    ['1e6', '1.0005e6', '1.001e6']
    """
    step, largest = ticks[1] - ticks[0], max(abs(tick) for tick in ticks)
    if largest < 1e-3 or largest >= 1e6:
        labels = [_power_of_ten(tick, step) for tick in ticks]
    else:
        # Steps of 0.25 and 2.5 need one digit more than their power of ten; at most six fit the margin.
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step * 10**decimals * 10) % 10 != 0
        labels = [f"{tick:.{min(decimals, 6)}f}" for tick in ticks]
    return ["\u2212" + label[1:] if label.startswith("-") else label for label in labels]


def _power_of_ten(tick: float, step: float) -> str:
    """A tick in scientific form, with the digits that ticks `step` apart differ in.

    >>> _power_of_ten(2500000.0, 500000.0), _power_of_ten(0.0, 1.0), _power_of_ten(-3e-12, 1e-12)
    ('2.5e6', '0', '-3e-12')
    """
    if tick == 0:
        return "0"
    # Two digits beyond the step's own power of ten: steps are 1, 2, 2.5 or 5 of it.
    digits = max(1, math.floor(math.log10(abs(tick))) - math.floor(math.log10(step)) + 2)
    mantissa, power = f"{tick:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"


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
    piece what the whole one covers.

    Args:
        y: values [N]; NaN: none.
        limit: most points, at least 10; a curve with gaps may have a quarter more.
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
    *,
    x_range: tuple[float, float] | None = None,
    baseline: float | None = None,
    percent: bool = False,
) -> Markup:
    """A chart of one or more curves over the iterations, or an empty string without any finite value.

    Args:
        series: the curves; two or more get a legend.
        x_range: first and last iteration of the axis; None: those of the curves.
        baseline: level of the base model, a dashed line.
        percent: whether values are shares in [0, 1], labelled in per cent.
    """
    series = [s for s in series if np.isfinite(s.y).any()]
    if not series:
        return Markup("")
    shown = [s if s.markers or len(s.y) < SMOOTH_FROM else Series(s.label, s.x, smooth(s.y)) for s in series]
    levels = [] if baseline is None else [baseline]
    low = min([float(np.nanmin(s.y)) for s in series] + levels)
    high = max([float(np.nanmax(s.y)) for s in series] + levels)
    ticks = nice_ticks(low, high)
    x_low, x_high = x_range or (min(float(s.x[0]) for s in series), max(float(s.x[-1]) for s in series))
    x_high = max(x_high, x_low + 1)

    def px(x: np.ndarray | float) -> np.ndarray:
        return LEFT + (np.asarray(x, float) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: np.ndarray | float) -> np.ndarray:
        return TOP + (ticks[-1] - np.asarray(y, float)) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = _axes(ticks, py, x_low, x_high, px, percent)
    if baseline is not None:
        y = float(py(baseline))
        parts.append(f'<line class="baseline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        below = y + 11 if y < TOP + 14 else y - 4
        parts.append(f'<text class="baseline-label" x="{WIDTH - RIGHT}" y="{below:.1f}">base</text>')
    for index, (raw, curve) in enumerate(zip(series, shown, strict=True)):
        color = f"s{index % COLORS}"
        if curve is not raw:
            parts.append(_path(px(raw.x), py(raw.y), f"raw {color}"))
        parts.append(_path(px(curve.x), py(curve.y), f"curve {color}"))
        if curve.markers:
            known = np.isfinite(curve.y)
            parts += [
                f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in zip(px(curve.x[known]), py(curve.y[known]), strict=True)
            ]
    label, readout = escape(_summary(series, percent)), escape(json.dumps(_readout(series, px, percent)))
    # Every part is numbers and class names, or escaped.
    svg = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-readout="{readout}">{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
    return Markup(svg) + (_legend(series) if len(series) > 1 else Markup(""))


def interval_plot(
    rows: Sequence[tuple[str, float, float, float]], *, domain: tuple[float, float] | None = None, zero: bool = False
) -> Markup:
    """Means with their intervals on one axis, one row each, for a table cell.

    Args:
        rows: (class, mean, low, high); with a NaN bound the mean alone is drawn.
        domain: ends of the axis; None: those of the rows.
        zero: whether 0 is on the axis, with a line.
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

    height = pitch * len(rows) + 4
    parts = [f'<line class="zero" x1="{px(0):.1f}" x2="{px(0):.1f}" y1="0" y2="{height}"/>'] if zero else []
    for index, (name, mean, bottom, top) in enumerate(rows):
        y = 2 + pitch * (index + 0.5)
        parts.append(f'<line class="rail" x1="{pad}" x2="{width - pad}" y1="{y}" y2="{y}"/>')
        if math.isfinite(bottom) and math.isfinite(top):
            ends = f'x1="{px(bottom):.1f}" x2="{px(top):.1f}"'
            parts.append(f'<line class="whisker {escape(name)}" {ends} y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="{escape(name)}" cx="{px(mean):.1f}" cy="{y}" r="3.6"/>')
    return Markup(
        f'<svg class="intervals" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'aria-hidden="true">{"".join(parts)}</svg>'
    )


def _axes(ticks: Sequence[float], py: Scale, x_low: float, x_high: float, px: Scale, percent: bool) -> list[str]:
    parts = []
    labels = [f"{label} %" for label in tick_labels([100 * tick for tick in ticks])] if percent else tick_labels(ticks)
    for tick, label in zip(ticks, labels, strict=True):
        y = float(py(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{label}</text>')
    for tick in nice_ticks(x_low, x_high, 5):
        # Iterations are whole numbers, and ticks outside the data would extend the axis.
        if x_low <= tick <= x_high and tick == int(tick):
            parts.append(f'<text class="tick x" x="{float(px(tick)):.1f}" y="{HEIGHT - 7}">{int(tick)}</text>')
    return parts


def _path(x: np.ndarray, y: np.ndarray, name: str) -> str:
    """A polyline that is interrupted at each NaN; a single point between two of them becomes a dot."""
    kept = thin(y, MAX_POINTS)
    commands, pen_down = [], False
    for a, b in zip(x[kept], y[kept], strict=True):
        if not math.isfinite(b):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{a:.1f} {b:.1f}" + ("" if pen_down else "h0"))
        pen_down = True
    return f'<path class="{name}" d="{"".join(commands)}"/>'


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.6g}"


def _readout(series: Sequence[Series], px: Scale, percent: bool) -> list[list]:
    """[[x in user units, text], ...] for each iteration, shown by the page under the pointer."""
    known: dict[float, list[str]] = {}
    for s in series:
        kept = thin(s.y, MAX_POINTS)
        for x, y in zip(s.x[kept], s.y[kept], strict=True):
            if math.isfinite(y):
                name = f"{s.label} " if len(series) > 1 else ""
                known.setdefault(float(x), []).append(name + _value(float(y), percent))
    places = sorted(known)
    units = px(np.asarray(places)).round(1).tolist()
    return [[u, f"iteration {x:.0f}: " + ", ".join(known[x])] for u, x in zip(units, places, strict=True)]


def _summary(series: Sequence[Series], percent: bool) -> str:
    ends = []
    for s in series:
        values = s.y[np.isfinite(s.y)]
        ends.append(f"{s.label} from {_value(float(values[0]), percent)} to {_value(float(values[-1]), percent)}")
    return "; ".join(ends)


def _legend(series: Sequence[Series]) -> Markup:
    items = [Markup('<li><i class="s{}"></i>{}</li>').format(i % COLORS, s.label) for i, s in enumerate(series)]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))
