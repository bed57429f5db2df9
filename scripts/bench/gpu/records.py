"""Results of a benchmark: one JSON object a line as soon as it is there, and a table at the end."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class Records:
    """Results that are appended to a file at once, so that a time limit loses none.

    Args:
        file: JSON lines; None: none are written.
        common: entries of every line.
    """

    def __init__(self, file: Path | None, **common: Any) -> None:
        self.file, self.common = file, common
        self.rows: list[Row] = []

    def add(self, **values: Any) -> Row:
        """Keep a result and write it."""
        row = self.common | values
        self.rows.append(row)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        return row

    def attempt(self, work: Callable[[], Row | list[Row]], **names: Any) -> bool:
        """The results of `work` with `names`, or a line with its error, which the others do not suffer from.

        Returns:
            Whether it succeeded.
        """
        started = time.perf_counter()
        try:
            result = work()
        except Exception as error:  # whatever one measurement lacks, the others are still worth their time
            lines = str(error).splitlines() or [""]
            self.add(**names, error=f"{type(error).__name__}: {lines[0]}"[:400])
            failed = True
        else:
            spent = round(time.perf_counter() - started, 1)
            for row in result if isinstance(result, list) else [result]:
                self.add(**names, **row, spent_s=spent)
            failed = False
        # A failed work may hold the memory that the next one needs.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return not failed

    @property
    def succeeded(self) -> bool:
        """At least one result is no error."""
        return any("error" not in row for row in self.rows)


def middle(values: Sequence[float]) -> float:
    """Median with four digits; NaN without values."""
    return float(f"{statistics.median(values):.4g}") if values else float("nan")


def table(rows: Sequence[Row], leave_out: Sequence[str] = ()) -> str:
    """Markdown tables of rows, one for each set of columns that follow each other.

    >>> print(table([{"what": "copy", "gbs": 4.25}, {"what": "gemm", "error": "no"}]))
    | what | gbs |
    |---|---|
    | copy | 4.25 |
    <BLANKLINE>
    | what | error |
    |---|---|
    | gemm | no |
    """
    parts: list[list[str]] = []
    before: list[str] | None = None
    for row in rows:
        shown = {name: value for name, value in row.items() if name not in leave_out}
        names = list(shown)
        if names != before:
            parts.append([f"| {' | '.join(names)} |", "|" + "---|" * len(names)])
            before = names
        parts[-1].append(f"| {' | '.join(_cell(value) for value in shown.values())} |")
    return "\n\n".join("\n".join(lines) for lines in parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    return "" if value is None else str(value)
