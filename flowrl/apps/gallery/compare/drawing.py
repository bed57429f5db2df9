"""Charts of several runs: curves over any quantity, and points with intervals. SVG in user units, as in `charts`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from flowrl.apps.gallery.charts import COLORS, MAX_POINTS, nice_ticks, tick_labels

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 12, 40


@dataclass(frozen=True, slots=True)
class Style:
    """Look of a recipe: one of `COLORS` colours; every further round of them another dash and marker."""

    number: int

    @property
    def color(self) -> str:
        return f"s{self.number % COLORS}"

    @property
    def dash(self) -> str:
        return f"d{self.number // COLORS % 3}"

    @property
    def classes(self) -> str:
        return f"{self.color} {self.dash}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity of the horizontal axis, in the units of the data times `scale`."""

    name: str
    """Label under the axis, with the unit."""
    scale: float = 1.0

    def text(self, x: float) -> str:
        value = x * self.scale
        return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a run joined by a line, `x` [N] ascending."""

    label: str
    style: Style
    x: np.ndarray
    y: np.ndarray


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
class _Frame:
    """Axes of a chart."""

    x_low: float
    x_high: float
    ticks: list[float]

    def px(self, x: np.ndarray | float) -> np.ndarray:
        return LEFT + (np.asarray(x, float) - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def py(self, y: np.ndarray | float) -> np.ndarray:
        low, high = self.ticks[0], self.ticks[-1]
        return TOP + (high - np.asarray(y, float)) / (high - low) * (HEIGHT - TOP - BOTTOM)


def curves(lines: Sequence[Curve], axis: Axis, *, percent: bool) -> Markup:
    """Curves of several runs over one quantity; an empty string without any point."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return Markup("")
    frame = _frame(np.concatenate([line.x for line in lines]), np.concatenate([line.y for line in lines]))
    parts = _axes(frame, axis, percent)
    for line in lines:
        step = max(1, math.ceil(len(line.x) / MAX_POINTS))
        known = np.isfinite(line.y)
        xs, ys = frame.px(line.x[known][::step]), frame.py(line.y[known][::step])
        way = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(xs, ys, strict=True))
        parts.append(f'<path class="curve {line.style.classes}" d="M{way}"/>')
        if len(xs) <= 40:
            parts += [_dot(line.style, a, b, 2.6) for a, b in zip(xs, ys, strict=True)]
    return _svg(parts, _of_curves(lines, axis, percent), _readout(lines, frame, axis, percent))


def points(marks: Sequence[Point], axis: Axis, *, percent: bool, sign: int) -> Markup:
    """Results over costs, the undominated ones joined; `sign` 1: higher is better. Empty below two points."""
    marks = [mark for mark in marks if math.isfinite(mark.x) and math.isfinite(mark.y)]
    if len(marks) < 2:
        return Markup("")
    ends = [v for mark in marks for v in (mark.y, mark.low, mark.high) if math.isfinite(v)]
    frame = _frame(np.asarray([0.0, *(mark.x for mark in marks)]), np.asarray(ends))
    parts = _axes(frame, axis, percent)
    best = front(marks, sign)
    way = "L".join(f"{float(frame.px(m.x)):.1f} {float(frame.py(m.y)):.1f}" for m in best)
    if len(best) > 1:
        parts.append(f'<path class="front" d="M{way}"/>')
    for mark in marks:
        x, y = float(frame.px(mark.x)), float(frame.py(mark.y))
        if math.isfinite(mark.low) and math.isfinite(mark.high):
            low, high = float(frame.py(mark.low)), float(frame.py(mark.high))
            parts.append(f'<path class="bar {mark.style.color}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        parts.append(_dot(mark.style, x, y, 4.5))
    texts = [f"{m.label}: {_value(m.y, percent)} at {axis.text(m.x)}" for m in sorted(marks, key=lambda m: m.x)]
    read = [
        [round(float(frame.px(m.x)), 1), text] for m, text in zip(sorted(marks, key=lambda m: m.x), texts, strict=True)
    ]
    return _svg(parts, f"over {axis.name}: " + "; ".join(texts), read)


def front(marks: Sequence[Point], sign: int) -> list[Point]:
    """Points that no other one beats in both: cheaper or as cheap, and better. By rising cost."""
    result: list[Point] = []
    for mark in sorted(marks, key=lambda m: (m.x, -sign * m.y)):
        if not result or sign * mark.y > sign * result[-1].y:
            result.append(mark)
    return result


def legend(entries: Sequence[tuple[str, Style]]) -> Markup:
    """Names with their colours and markers."""
    items = []
    for label, style in entries:
        swatch = (
            f'<svg class="swatch" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">'
            f'<path class="curve {style.classes}" d="M1 5H25"/>{_dot(style, 13, 5, 3.2)}</svg>'
        )
        items.append(Markup("<li>{}{}</li>").format(Markup(swatch), label))
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _frame(x: np.ndarray, y: np.ndarray) -> _Frame:
    known = y[np.isfinite(y)]
    low, high = float(x.min()), float(x.max())
    return _Frame(low, high if high > low else low + 1, nice_ticks(float(known.min()), float(known.max())))


def _axes(frame: _Frame, axis: Axis, percent: bool) -> list[str]:
    parts = []
    labels = tick_labels([100 * t for t in frame.ticks]) if percent else tick_labels(frame.ticks)
    for tick, label in zip(frame.ticks, labels, strict=True):
        y = float(frame.py(tick))
        unit = " %" if percent else ""
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{label}{unit}</text>')
    ticks = nice_ticks(frame.x_low * axis.scale, frame.x_high * axis.scale, 5)
    for tick, label in zip(ticks, _compact(ticks), strict=True):
        x = tick / axis.scale
        if frame.x_low - 1e-9 <= x <= frame.x_high * (1 + 1e-9):
            parts.append(f'<text class="tick x" x="{float(frame.px(x)):.1f}" y="{HEIGHT - 24}">{label}</text>')
    parts.append(f'<text class="tick x" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(axis.name)}</text>')
    return parts


def _compact(ticks: Sequence[float]) -> list[str]:
    """Labels of an axis: thousands and millions in short.

    >>> _compact([0.0, 20000.0]), _compact([0.0, 0.5])
    (['0', '20k'], ['0.0', '0.5'])
    """
    largest = max(abs(tick) for tick in ticks)
    for least, unit in ((2e6, "M"), (2e3, "k")):
        if largest >= least:
            size = 1e6 if unit == "M" else 1e3
            return ["0" if tick == 0 else f"{tick / size:g}{unit}" for tick in ticks]
    return tick_labels(ticks)


def _dot(style: Style, x: float, y: float, radius: float) -> str:
    return f'<circle class="{style.classes}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.4g}"


def _readout(lines: Sequence[Curve], frame: _Frame, axis: Axis, percent: bool) -> list[list]:
    known: dict[float, list[str]] = {}
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            if math.isfinite(y):
                known.setdefault(float(x), []).append(f"{line.label} {_value(float(y), percent)}")
    return [[round(float(frame.px(x)), 1), f"{axis.text(x)}: " + ", ".join(known[x])] for x in sorted(known)]


def _of_curves(lines: Sequence[Curve], axis: Axis, percent: bool) -> str:
    ends = []
    for line in lines:
        known = line.y[np.isfinite(line.y)]
        ends.append(f"{line.label} from {_value(float(known[0]), percent)} to {_value(float(known[-1]), percent)}")
    return f"over {axis.name}: " + "; ".join(ends)


def _svg(parts: Sequence[str], label: str, readout: list[list]) -> Markup:
    # Every part is numbers and class names, or escaped.
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'data-readout="{escape(json.dumps(readout))}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
