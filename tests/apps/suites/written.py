"""Rows as the runner writes them, for tests of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowrl.evaluation.suite import Item, Row, Table


def rows_of(
    items: Sequence[Item],
    answers: Mapping[tuple[str, int], Sequence[float | None]],
    scores: Callable[[Sequence[float], Item], dict[str, float | None]],
) -> list[Row]:
    """Rows of a judge's answers, as the runner writes them."""
    nan = float("nan")
    return [
        Row(
            item.id,
            item.text,
            k,
            scores=scores([nan if value is None else value for value in given], item),
            answers=list(given),
        )
        for item in items
        for (key, k), given in answers.items()
        if key == item.id
    ]


def means(table: Table) -> dict[str, float]:
    return {line.name: line.mean for line in table.lines}
