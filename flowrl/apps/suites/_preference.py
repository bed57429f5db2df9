"""The table of a suite that any score of preference or alignment may judge: each score over all, and by group."""

from collections.abc import Sequence

from flowrl.evaluation.suite import Item, Line, Row, Table, by_tag, line, outputs_of, score, tags_of


def table_of(rows: Sequence[Row], items: Sequence[Item], places: Sequence[int] = (0,)) -> Table:
    """Means of each score over all images, then for the tags at each of `places`; the first score is the headline.

    An empty tag, of a prompt whose file has no such column, has no line.
    """
    lines: list[Line] = []
    names = outputs_of(rows)
    for name in names:
        lines.append(line(name, [rows], score(name), output=name))
        for place in places:
            for tag, group in by_tag(rows, items, list(filter(None, tags_of(items, place)))).items():
                lines.append(line(f"{name}: {tag}", [group], score(name), output=name))
    return Table(tuple(lines), names[0] if names else "")
