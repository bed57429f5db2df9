"""Test points: several answers to an image, each of which belongs to a kind of its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowrl.evaluation.suite import Item, Line, Part, Row, line_of
from flowrl.evaluation.suite_intervals import together
from flowrl.statistics.intervals import Bounds

PERCENT = (0.0, 100.0)
"""Bounds of shares times 100."""
POINT = "point {}"
"""Score of a test point, from 1, where an official evaluator gave it: rows keep the answers of a judge alone."""


def answers_of(row: Row, item: Item) -> list[float]:
    """The answers to a sample's questions, of the judge or of an official evaluator; NaN where there is none."""
    count = len(item.metadata["questions"])
    given = row.answers or [row.scores.get(POINT.format(place)) for place in range(1, count + 1)]
    if len(given) != count:
        return [math.nan] * count
    return [math.nan if value is None else float(value) for value in given]


def has_points(rows: Sequence[Row]) -> bool:
    """Whether answers to single questions are known."""
    return any(row.answers or POINT.format(1) in row.scores for row in rows)


def known(value: float) -> float | None:
    """A score of a row: None where there is none."""
    return None if math.isnan(value) else value


def by_kind(
    rows: Sequence[Row],
    items: Sequence[Item],
    kinds: Callable[[Item], Sequence[str]],
    values: Callable[[Row, Item], Sequence[float]],
) -> dict[str, list[Row]]:
    """Kind -> rows whose answers are those of its points alone; a row without a point of the kind is left out.

    `kinds`: the kind of each point of a prompt; `values`: the answer to each point of a sample.
    """
    known_items = {item.id: item for item in items}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        item = known_items[row.id]
        own = kinds(item)
        given = values(row, item)
        for kind in dict.fromkeys(own):
            chosen = [value for value, its in zip(given, own, strict=True) if its == kind]
            groups.setdefault(kind, []).append(Row(row.id, row.prompt, row.k, answers=chosen))
    return groups


def prompt_line(
    name: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    scale: float = 1.0,
    bounds: Bounds | None = None,
    output: str = "",
) -> Line:
    """The mean over prompts of the mean of each over its images; an image without a value is left out."""
    found: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for row in rows:
        own = value(row)
        texts[row.id] = row.prompt
        found.setdefault(row.id, []).extend([] if own is None or math.isnan(own) else [scale * own])
    values: dict[str, tuple[float, ...]] = {}
    for key, own in found.items():
        mean = math.fsum(own) / len(own) if own else math.nan
        values[texts[key]] = (*values.get(texts[key], ()), mean)
    return line_of(name, (Part(values),), len(rows), sum(map(len, found.values())), bounds=bounds, output=output)


def mean_of_parts(
    name: str, parts: Sequence[Part], n_images: int, n_scored: int, *, bounds: Bounds | None = None, seed: int = 0
) -> Line:
    """The weighted mean of the means of parts that share their prompts: a prompt is drawn with all its values."""
    line = line_of(name, tuple(parts), n_images, n_scored, bounds=bounds)
    _, low, high = together(parts, bounds, seed)
    return replace(line, low=low, high=high, shared=True)
