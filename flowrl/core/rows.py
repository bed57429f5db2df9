"""Names of metrics, as the rows of `metrics.jsonl` have them (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_THE_MACHINE = ("time/", "perf/", "memory/")
"""Beginnings of the names whose values depend on the machine and on what else runs there."""


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a metrics row that two runs of one configuration have in common.

    >>> repeatable({"grad/norm": 1.0, "time/update_s": 0.3, "perf/tflops": 2.0, "memory/peak_gib": 1.5})
    {'grad/norm': 1.0}
    """
    return {name: value for name, value in row.items() if not name.startswith(OF_THE_MACHINE)}
