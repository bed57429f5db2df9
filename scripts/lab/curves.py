"""Curves of the lab's recipes for the pages of the methods: docs/lab/curves/NAME.svg, a line a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.lab.page import SIZE, Entry
from scripts.pages.svg import Panel, Picture

COLORS = "abc"


def curve_of(entry: Entry) -> str | None:
    """The picture of a recipe as SVG; None where it has no cell.

    A thick line goes from the base to the tuned model on all held-out captions, with the tuned one's 95 % interval; a
    thin one through the evaluations on the way, on the first of those captions, where a cell keeps some.
    """
    cells = {seed: cell["summary"] for seed, cell in entry.counted.items()}
    if not cells:
        return None
    metric, scale = (SIZE, 1.0) if entry.sized else (entry.metric, 100.0)
    longest = max(cell["iterations"] for cell in cells.values())
    ends = _ends(cells.values(), metric, scale)
    picture = Picture(232, f"{entry.name}: {metric} against iterations, by seed")
    panel = Panel(picture, ((44, 40), (464, 172)), (0, longest), ends)
    step = (ends[1] - ends[0]) / 4
    panel.axes([0, longest // 2, longest], [ends[0] + step * part for part in range(5)])
    what = "size of the images, kB" if entry.sized else "strict accuracy, per cent"
    picture.text(14, 22, f"{entry.name}: {what}", "soft small")
    picture.text(464, 202, "iteration", "soft small", "end")
    for seed, cell in cells.items():
        _draw(panel, cell, metric, scale, COLORS[seed % len(COLORS)])
    picture.legend(220, [(COLORS[seed % len(COLORS)], f"seed {seed}") for seed in cells])
    return picture.svg()


def _ends(cells: Any, metric: str, scale: float) -> tuple[float, float]:
    """Ends of the axis: round numbers around everything that is drawn."""
    values = [
        scale * cell[when][metric][key] for cell in cells for when in ("base", "tuned") for key in ("low", "high")
    ]
    values += [scale * row[metric] for cell in cells for row in cell.get("curve") or () if metric in row]
    unit = 20.0 if scale > 1 else 0.4
    return unit * (min(values) // unit), unit * -(-max(values) // unit)


def _draw(panel: Panel, cell: dict[str, Any], metric: str, scale: float, color: str) -> None:
    end, tuned = cell["iterations"], {key: scale * value for key, value in cell["tuned"][metric].items()}
    rows = [row for row in cell.get("curve") or () if metric in row]
    if len(rows) > 2:
        panel.draw([row["iteration"] for row in rows], [scale * row[metric] for row in rows], f"thin {color}")
    panel.draw(
        [0, end], [scale * cell["base"][metric]["mean"], tuned["mean"]], f"{color}{' dash' if len(rows) > 2 else ''}"
    )
    panel.picture.line(panel.at(end, tuned["low"]), panel.at(end, tuned["high"]), f"line {color}")
    panel.picture.dot(panel.at(end, tuned["mean"]), 3.5, f"f{color}")


def draw_curves(entries: list[Entry], folder: Path) -> None:
    """Write the pictures of all recipes that have cells."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        text = curve_of(entry)
        if text is not None:
            (folder / f"{entry.name}.svg").write_text(text, encoding="utf-8")
