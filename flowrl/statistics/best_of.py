"""Best of n: the expected score of the best of n images, without bias, from a pool of N >= n scored ones."""

import math

import numpy as np


def best_of(values: np.ndarray, judged: np.ndarray, count: int) -> float:
    """Expected judgement of the best by value among `count` of N images at random, without replacement. `values` [N]:
    what is chosen by; the highest is the best. `judged`: the judge's scores, [N]. `count`: 1 to N.

    Equal values are chosen among at random. With N - a images left to choose `count` from, none of the a best is
    among them with probability C(N - a, count) / C(N, count).

    >>> best_of(np.asarray([0.0, 1.0, 2.0]), np.asarray([0.0, 0.0, 3.0]), 2)
    2.0
    """
    total = len(values)
    if not 1 <= count <= total:
        raise ValueError(f"best of {count} needs a pool of as many images, there are {total}")
    expected, above, ways = 0.0, 0, math.comb(total, count)
    for value in sorted(set(values.tolist()), reverse=True):
        block = values == value
        behind = above + int(block.sum())
        chance = (math.comb(total - above, count) - math.comb(total - behind, count)) / ways
        expected, above = expected + chance * float(judged[block].mean()), behind
    return expected


def curves(values: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """`best_of` 1 to S for each of P prompts, [P, S] from tables [P, S]; NaN for a prompt without one of its scores."""
    found = np.full(values.shape, np.nan)
    for row in np.flatnonzero(np.isfinite(values + judged).all(axis=1)):
        found[row] = [best_of(values[row], judged[row], count) for count in range(1, values.shape[1] + 1)]
    return found
