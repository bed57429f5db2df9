"""Two pieces of work timed in turn, and the interval of a median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def paired(
    first: Callable[[], Any],
    second: Callable[[], Any],
    count: int,
    *,
    warmups: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Milliseconds of `count` pairs of calls, which take turns in coming first, after `warmups` pairs.

    `clock` gives seconds.
    """
    rows = []
    for number in range(count + warmups):
        took = {}
        for k in (0, 1) if number % 2 else (1, 0):
            started = clock()
            (first, second)[k]()
            took[k] = 1000 * (clock() - started)
        rows.append((took[0], took[1]))
    return rows[warmups:]


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): the median with its 95 % interval by order statistics, for any distribution.

    >>> median_interval([float(k) for k in range(101)])
    (50.0, 40.0, 60.0)
    """
    ordered, n = sorted(values), len(values)
    reach = 1.96 * n**0.5 / 2
    low, high = max(round((n - 1) / 2 - reach), 0), min(round((n - 1) / 2 + reach), n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]
