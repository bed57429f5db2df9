"""Coverage of the 95 % intervals of flowrl/statistics in simulation: the table of docs/judging/statistics.md.

    python scripts/coverage.py [RUNS]

Every row is a population, every column a number of distinct prompts; a cell is the share of RUNS experiments
(default 4000) whose interval holds the true mean. A second table has the cells outside 93 to 97 %, with the share of
experiments in which no prompt differs from another and the coverage of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from flowrl.statistics import intervals

SIZES = (8, 12, 20, 30, 50, 200)
DRAWS = 1000
"""Resamples of an interval here; the default of 10 000 changes a cell by less than its own error."""

Sample = tuple[np.ndarray, np.ndarray]
"""(values, groups), [P] each."""


def alone(values: np.ndarray) -> Sample:
    return values, np.arange(len(values))


def two_seeds(rng: np.random.Generator, n: int) -> Sample:
    """Pass or fail at two seeds before and after, prompts of different difficulty: a mean gain of 0.15."""
    chance = rng.uniform(0.0, 0.85, (n, 1))
    after, before = rng.random((n, 2)) < chance + 0.15, rng.random((n, 2)) < chance
    return alone(after.mean(1) - before.mean(1))


def passes(rng: np.random.Generator, n: int, gain: float = 0.3, loss: float = 0.1) -> Sample:
    """One seed: shares of the prompts that gain and that lose; the others are ties."""
    draw = rng.random(n)
    return alone((draw < gain) * 1.0 - (draw > 1 - loss))


def duplicated(rng: np.random.Generator, n: int) -> Sample:
    """A prompt is in the list once, twice or four times; its values share half of their variance and more."""
    groups = np.repeat(np.arange(n), rng.choice([1, 1, 1, 2, 4], size=n))
    return rng.normal(size=n)[groups] + 0.5 * rng.normal(size=len(groups)), groups


SHARE, CHANGE = (0.0, 1.0), (-1.0, 1.0)

POPULATIONS: dict[str, tuple[Callable[[np.random.Generator, int], Sample], float, intervals.Bounds | None]] = {
    "paired gain, normal": (lambda rng, n: alone(rng.normal(0.3, 1.0, n)), 0.3, None),
    "paired gain, heavy tails (t, 3 degrees)": (lambda rng, n: alone(rng.standard_t(3, n)), 0.0, None),
    "skewed (gamma, shape 2)": (lambda rng, n: alone(rng.gamma(2.0, size=n)), 2.0, None),
    "very skewed (exponential)": (lambda rng, n: alone(rng.exponential(size=n)), 1.0, None),
    "pass or fail, 90 % pass": (lambda rng, n: alone((rng.random(n) < 0.9) * 1.0), 0.9, SHARE),
    "pass or fail, paired, 60 % ties": (passes, 0.2, CHANGE),
    "pass or fail, paired, 80 % ties": (lambda rng, n: passes(rng, n, 0.15, 0.05), 0.1, CHANGE),
    "pass or fail, paired, two seeds": (two_seeds, 0.15, CHANGE),
    "gain with 40 % exact ties": (lambda rng, n: alone(rng.normal(0.5, 1.0, n) * (rng.random(n) < 0.6)), 0.3, None),
    "gain with 70 % exact ties": (lambda rng, n: alone(rng.normal(0.5, 1.0, n) * (rng.random(n) < 0.3)), 0.15, None),
    "duplicated prompts": (duplicated, 0.0, None),
}


def covered(population: str, size: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """([runs] whether the interval holds the true mean, [runs] whether any two prompts differ)."""
    draw, truth, bounds = POPULATIONS[population]
    rng, hits, apart = np.random.default_rng([size, *population.encode()]), [], []
    for _ in range(runs):
        values, groups = draw(rng, size)
        found = intervals.interval(values, groups, bounds=bounds)
        hits.append(found["low"] - 1e-12 <= truth <= found["high"] + 1e-12)
        apart.append(np.ptp(values) > 0)
    return np.asarray(hits), np.asarray(apart)


def coverage(population: str, size: int, runs: int) -> float:
    """Share of experiments whose interval holds the true mean."""
    return float(covered(population, size, runs)[0].mean())


def main(runs: int) -> None:
    intervals.BOOTSTRAP = DRAWS
    outside = []
    print("| population | " + " | ".join(f"{size} prompts" for size in SIZES) + " |")
    print("|---" * (1 + len(SIZES)) + "|")
    for name in POPULATIONS:
        cells = []
        for size in SIZES:
            hits, apart = covered(name, size, runs)
            share = hits.mean()
            cells.append(f"{share:.1%}".replace("%", " %"))
            if not 0.93 <= share <= 0.97:
                parts = (share, 1 - apart.mean(), hits[apart].mean())
                outside.append(f"| {name} | {size} | " + " | ".join(f"{100 * part:.1f} %" for part in parts) + " |")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print("\n| population | prompts | coverage | no prompt differs | coverage of the others |\n|---|---|---|---|---|")
    print("\n".join(outside))
    print(
        f"\n{runs} experiments a cell: a cell of 95 % has a standard error of {100 * (0.0475 / runs) ** 0.5:.1f} points"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
