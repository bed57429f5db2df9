"""Small pictures for the documentation: SVG with its own colours for light and dark.

A picture lies on a card of its own, so that it can be read whichever of the two the reader's browser asks for. It is
480 units wide: text of 12 units stays readable on a phone. Coordinates are rounded to a tenth, so that the last digits
of a number do not change the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 480
STYLE = """
.card{fill:#fff;stroke:#d8dce3}.box{fill:#f3f5f8;stroke:#8a93a3}
text{font:12px system-ui,sans-serif;fill:#1f2430}.soft{fill:#59616f}.head{font-weight:600}.small{font-size:11px}
.grid{stroke:#e3e6eb}.axis{stroke:#8a93a3}.plain{stroke:#8a93a3;fill:none}.hollow{fill:#fff;stroke:#8a93a3}
.line{fill:none;stroke-width:2}.thin{stroke-width:1.2}.dash{stroke-dasharray:4 3}.band{fill:#8a93a3;opacity:.16}
.half{opacity:.35}
.a{stroke:#1f6fb2}.b{stroke:#c2410c}.c{stroke:#15803d}.d{stroke:#8a4fbf}.e{stroke:#a16207}.f{stroke:#be185d}
.fa{fill:#1f6fb2}.fb{fill:#c2410c}.fc{fill:#15803d}.fd{fill:#8a4fbf}.fe{fill:#a16207}.ff{fill:#be185d}.fg{fill:#8a93a3}
@media (prefers-color-scheme:dark){
.card{fill:#1c2029;stroke:#3a4150}.box{fill:#272d39;stroke:#7d879a}
text{fill:#e6e9ef}.soft{fill:#aab2c0}.grid{stroke:#343b49}.axis,.plain{stroke:#7d879a}.hollow{fill:#1c2029;stroke:#7d879a}
.a{stroke:#6cb2f0}.b{stroke:#fb923c}.c{stroke:#5fd08a}.d{stroke:#c79bf2}.e{stroke:#e3b341}.f{stroke:#f472b6}
.fa{fill:#6cb2f0}.fb{fill:#fb923c}.fc{fill:#5fd08a}.fd{fill:#c79bf2}.fe{fill:#e3b341}.ff{fill:#f472b6}}
"""
Point = tuple[float, float]


def _n(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


class Picture:
    """An SVG that grows part by part."""

    def __init__(self, height: float, title: str, width: float = WIDTH) -> None:
        self.height, self.width, self.title = height, width, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{classes}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def line(self, start: Point, end: Point, classes: str = "axis") -> None:
        (x, y), (x2, y2) = start, end
        self.parts.append(f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{classes}"/>')

    def path(self, points: Iterable[Point], classes: str) -> None:
        text = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.parts.append(f'<path d="M{text}" class="{classes}"/>')

    def curve(self, start: Point, bend: float, end: Point, classes: str) -> None:
        """From a point to another, both ends level, bent around the middle `bend`."""
        (x, y), (x2, y2) = start, end
        way = f"M{_n(x)} {_n(y)}C{_n(bend)} {_n(y)} {_n(bend)} {_n(y2)} {_n(x2)} {_n(y2)}"
        self.parts.append(f'<path d="{way}" class="{classes}"/>')

    def rect(self, corner: Point, size: Point, classes: str, radius: float = 0) -> None:
        (x, y), (w, h) = corner, size
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="{_n(radius)}" class="{classes}"/>'
        )

    def dot(self, at: Point, radius: float, classes: str) -> None:
        self.parts.append(f'<circle cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}" class="{classes}"/>')

    def arrow(self, start: Point, end: Point) -> None:
        """A level or upright arrow."""
        (x, y), (x2, y2) = start, end
        self.line(start, end)
        dx, dy = (x2 > x) - (x2 < x), (y2 > y) - (y2 < y)
        self.path(
            [(x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx), end, (x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx)], "axis fg"
        )

    def legend(self, y: float, entries: Sequence[tuple[str, str]], x: float = 14) -> None:
        """Names of lines in a row: (class of the colour, text)."""
        for classes, text in entries:
            self.line((x, y - 4), (x + 16, y - 4), f"line {classes}")
            self.text(x + 21, y, text, "small")
            x += 33 + 6.1 * len(text)

    def svg(self) -> str:
        body = "\n".join(self.parts)
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        card = f'<rect x=".5" y=".5" width="{_n(self.width - 1)}" height="{_n(self.height - 1)}" rx="6" class="card"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n{card}\n{body}\n</svg>\n"
        )


class Panel:
    """Axes of numbers inside a picture."""

    def __init__(self, picture: Picture, box: tuple[Point, Point], x: Point, y: Point) -> None:
        """`box` holds the corners (left, top) and (right, bottom); `x` and `y` are the ends of the axes."""
        self.picture, self.box, self.x, self.y = picture, box, x, y

    def at(self, x: float, y: float) -> Point:
        (left, top), (right, bottom) = self.box
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    def axes(self, xs: Sequence[float], ys: Sequence[float], suffix: str = "") -> None:
        (left, _), (right, bottom) = self.box
        for value in ys:
            height = self.at(0, value)[1]
            self.picture.line((left, height), (right, height), "grid")
            self.picture.text(left - 5, height + 4, label(value) + suffix, "soft small", "end")
        for value in xs:
            self.picture.text(self.at(value, 0)[0], bottom + 15, label(value), "soft small", "middle")
        self.picture.line((left, bottom), (right, bottom))

    def draw(self, xs: Iterable[float], ys: Iterable[float], classes: str) -> None:
        self.picture.path([self.at(x, y) for x, y in zip(xs, ys, strict=True)], f"line {classes}")


def label(value: float) -> str:
    """A number for an axis.

    >>> label(-0.5), label(100.0)
    ('\u22120.5', '100')
    """
    return f"{value:g}".replace("-", "\u2212")


def unlike(written: str, shipped: str) -> str:
    """What two pictures differ in, "" where they are alike: their text equal, their numbers to 0.11 units.

    >>> unlike('<a x="1.0"/>', '<a x="1.1"/>'), unlike('<a x="1"/>', '<a x="2"/>')
    ('', 'number 0: 1 instead of 2')
    """
    number = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?")
    if number.sub("0", written) != number.sub("0", shipped):
        return "other parts or words"
    for place, (new, old) in enumerate(zip(number.findall(written), number.findall(shipped), strict=True)):
        if abs(float(new) - float(old)) > 0.11:
            return f"number {place}: {new} instead of {old}"
    return ""
