"""Rows as the runner writes them, for tests of tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence

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


def scored(items: Sequence[Item], values: Iterable[Sequence[float | None]], name: str) -> list[Row]:
    """Rows of one score; of each item the values of its samples."""
    return [
        Row(item.id, item.text, k, scores={name: None if value is None else float(value)})
        for item, own in zip(items, values, strict=True)
        for k, value in enumerate(own)
    ]


def official(found: Mapping[tuple[str, int], dict[str, float | None]]) -> list[Row]:
    """Rows of the results of an official evaluator."""
    return [Row(key, f"text of {key}", k, scores=scores) for (key, k), scores in found.items()]


def means(table: Table) -> dict[str, float]:
    return {line.name: line.mean for line in table.lines}
