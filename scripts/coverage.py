"""Coverage of the 95 % intervals of flowrl/statistics in simulation: the table of docs/judging.md.

    python scripts/coverage.py [RUNS]

Every row is a population, every column a number of distinct prompts; a cell is the share of RUNS experiments
(default 2000) whose interval holds the true mean.
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


def passes(rng: np.random.Generator, n: int) -> Sample:
    """One seed: 30 % of the prompts gain, 10 % lose, 60 % are ties."""
    draw = rng.random(n)
    return alone((draw < 0.3) * 1.0 - (draw > 0.9))


def duplicated(rng: np.random.Generator, n: int) -> Sample:
    """A prompt is in the list once, twice or four times; its values share half of their variance and more."""
    groups = np.repeat(np.arange(n), rng.choice([1, 1, 1, 2, 4], size=n))
    return rng.normal(size=n)[groups] + 0.5 * rng.normal(size=len(groups)), groups


POPULATIONS: dict[str, tuple[Callable[[np.random.Generator, int], Sample], float]] = {
    "paired gain, normal": (lambda rng, n: alone(rng.normal(0.3, 1.0, n)), 0.3),
    "paired gain, heavy tails (t, 3 degrees)": (lambda rng, n: alone(rng.standard_t(3, n)), 0.0),
    "skewed (gamma, shape 2)": (lambda rng, n: alone(rng.gamma(2.0, size=n)), 2.0),
    "very skewed (exponential)": (lambda rng, n: alone(rng.exponential(size=n)), 1.0),
    "pass or fail, paired, 60 % ties": (passes, 0.2),
    "pass or fail, paired, two seeds": (two_seeds, 0.15),
    "gain with 40 % exact ties": (lambda rng, n: alone(rng.normal(0.5, 1.0, n) * (rng.random(n) < 0.6)), 0.3),
    "gain with 70 % exact ties": (lambda rng, n: alone(rng.normal(0.5, 1.0, n) * (rng.random(n) < 0.3)), 0.15),
    "duplicated prompts": (duplicated, 0.0),
}


def coverage(population: str, size: int, runs: int) -> float:
    """Share of experiments whose interval holds the true mean."""
    draw, truth = POPULATIONS[population]
    rng, hits = np.random.default_rng([size, *population.encode()]), 0
    for _ in range(runs):
        found = intervals.interval(*draw(rng, size))
        hits += found["low"] - 1e-12 <= truth <= found["high"] + 1e-12
    return hits / runs


def main(runs: int) -> None:
    intervals.BOOTSTRAP = DRAWS
    print("| population | " + " | ".join(f"{size} prompts" for size in SIZES) + " |")
    print("|---" * (1 + len(SIZES)) + "|")
    for name in POPULATIONS:
        cells = [f"{100 * coverage(name, size, runs):.1f} %" for size in SIZES]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(
        f"\n{runs} experiments a cell: a cell of 95 % has a standard error of {100 * (0.0475 / runs) ** 0.5:.1f} points"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
