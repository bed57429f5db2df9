"""Numbers of a server in the text format of Prometheus."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from flowrl.core.assets import table

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the latency's buckets."""
Labels = tuple[tuple[str, str], ...]

_HELP: dict[str, tuple[str, str]] = table(Path(__file__).with_name("counters.yaml"))


class Counters:
    """Counts and gauges by name and labels; gauges are asked for when the page is made."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, dict[Labels, Callable[[], float]]] = {}
        self._buckets, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        table = self._counts.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        table[key] = table.get(key, 0) + value

    def watch(self, name: str, ask: Callable[[], float], **labels: str) -> None:
        self._gauges.setdefault(name, {})[tuple(sorted(labels.items()))] = ask

    def time(self, seconds: float) -> None:
        """One request of `flowrl_request_seconds`."""
        self._buckets[next((k for k, bound in enumerate(SECONDS) if seconds <= bound), len(SECONDS))] += 1
        self._sum += seconds

    def text(self) -> str:
        """The page."""
        lines = []
        for name, (kind, what) in _HELP.items():
            samples = self._samples(name, kind)
            if samples:
                lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *samples]
        return "\n".join(lines) + "\n"

    def _samples(self, name: str, kind: str) -> list[str]:
        if kind == "counter":
            return [f"{name}{_labels(key)} {value:.15g}" for key, value in self._counts.get(name, {}).items()]
        if kind == "gauge":
            return [f"{name}{_labels(key)} {ask():.15g}" for key, ask in self._gauges.get(name, {}).items()]
        totals = list(accumulate(self._buckets))
        if not totals[-1]:
            return []
        edges = (*(f"{bound:g}" for bound in SECONDS), "+Inf")
        lines = [f'{name}_bucket{{le="{edge}"}} {total}' for edge, total in zip(edges, totals, strict=True)]
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {totals[-1]}"]


def _labels(key: Labels) -> str:
    """
    >>> _labels((("reward", 'a"b'),))
    '{reward="a\\\\"b"}'
    """
    if not key:
        return ""
    escaped = ((n, v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for n, v in key)
    return "{" + ",".join(f'{n}="{v}"' for n, v in escaped) + "}"
