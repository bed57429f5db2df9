"""Rankings of several images under one prompt, read as their pairs (ImageReward, HPDv2)."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.data.options import PreferenceOptions
from flowrl.data.records import Lines, Records


class Rankings(Records):
    """Every two images of each record of a .jsonl, {prompt, chosen, rejected[, margin]} of its own.

    Scores or ranks that are equal are a margin of 0, a tie. All pairs of a ranking are used, as ImageReward trains on
    them (arXiv 2304.05977). Takes 8 bytes a record.

    Raises ConfigError: no such column, or a set of another form.
    """

    def __init__(self, base: Records, options: PreferenceOptions, where: str) -> None:
        self.base, self.options, self.files, self.folder = base, options, base.files, base.folder
        self.values = options.scores or options.ranks
        for name in (options.ranked, self.values):
            if name is not None and name not in base.names():
                raise ConfigError(f"{where}: has no column {name!r}; there are: {', '.join(base.names())}")
        if not isinstance(base, Lines):
            raise ConfigError(f"{where}: rankings are read from a .jsonl; write one, with the paths of the images")
        self._starts = array("Q", [0])
        for record in base.scan():
            self._starts.append(self._starts[-1] + len(self._pairs(record)))

    def __len__(self) -> int:
        return self._starts[-1]

    def names(self) -> list[str]:
        own = (self.options.chosen, self.options.rejected, *(["margin"] if self.values else []))
        return [*(name for name in self.base.names() if name not in (self.options.ranked, self.values)), *own]

    def place(self, row: int) -> str:
        record = bisect_right(self._starts, row) - 1
        return f"{self.base.place(record)}, pair {row - self._starts[record] + 1}"

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for record in self.base.scan():
            yield from self._pairs(record)

    def read(self, row: int) -> dict[str, Any] | None:
        record = bisect_right(self._starts, row) - 1
        return dict(enumerate(self._pairs(self.base.read(record)))).get(row - self._starts[record])

    def _pairs(self, record: dict[str, Any] | None) -> list[dict[str, Any] | None]:
        """The pairs of a record, the better image first; one that cannot be used for a record that is no ranking."""
        if record is None:
            return [None]
        options, images = self.options, record.get(str(self.options.ranked))
        rest = {name: value for name, value in record.items() if name not in (options.ranked, self.values)}
        given = None if self.values is None else record.get(self.values)
        if not isinstance(images, list) or len(images) < 2:
            return [rest | {options.chosen: images, options.rejected: None}]
        values = list(range(len(images))) if given is None else given
        numbers = isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
        if (given is None and self.values) or not numbers or len(values) != len(images):
            return [rest | {options.chosen: images[0], options.rejected: images[1], "margin": f"of {given!r}"}]
        sign, result = -1 if options.scores else 1, list[dict[str, Any] | None]()
        for pair in combinations(range(len(images)), 2):
            best, worst = sorted(pair, key=lambda place: sign * values[place])
            margin = {"margin": abs(values[best] - values[worst])} if self.values else {}
            result.append(rest | {options.chosen: images[best], options.rejected: images[worst]} | margin)
        return result
