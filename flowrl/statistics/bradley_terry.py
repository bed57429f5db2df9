"""Bradley-Terry strengths of samples that were compared two at a time, with a prior that keeps them finite.

P(i beats j) = 1 / (1 + exp(s_j - s_i)); a tie is half a win for each. The prior gives every sample `prior` virtual
comparisons, spread evenly over the others, half of them won: a clean sweep stays finite, all samples are connected, and
the strengths, whose mean is 0, are unique. For two samples with a and b wins

    s_1 - s_2 = log((a + prior / 2) / (b + prior / 2)).
"""

import numpy as np

_STEPS, _HALVINGS = 100, 60


def strengths(wins: np.ndarray, prior: float = 0.5) -> np.ndarray:
    """Strengths of G samples, [G] float64 with mean 0; NaN for a sample without a comparison.

    `wins` [G, G]: how often i beat j, a tie counted as half for both; the diagonal is not looked at. `prior`: virtual
    comparisons of each sample, above 0.

    Raises ValueError: a table that is not square, finite and from 0, or a prior that is not above 0.

    Newton's method on the strictly concave log posterior, each step halved until it rises.
    Source: Hunter, MM algorithms for generalized Bradley-Terry models, 2004 (the likelihood).

    >>> strengths(np.array([[0, 3], [1, 0]]), prior=2.0).round(4).tolist()
    [0.3466, -0.3466]
    """
    table = np.array(wins, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not np.isfinite(table).all() or (table < 0).any():
        raise ValueError(f"wins must be a square table of finite numbers from 0, got shape {table.shape}")
    if not prior > 0:
        raise ValueError(f"prior={prior} must be above 0: without one a clean sweep has no finite strengths")
    np.fill_diagonal(table, 0.0)
    voted = (table + table.T).sum(axis=1) > 0
    result = np.full(len(table), np.nan)
    if voted.any():
        result[voted] = _posterior_mode(table[np.ix_(voted, voted)], prior)
    return result


def _posterior_mode(wins: np.ndarray, prior: float) -> np.ndarray:
    """Strengths of samples that all have a comparison, so that there are two at least."""
    count = len(wins)
    wins = wins + prior / (2 * (count - 1)) * (1 - np.eye(count))
    games, found = wins + wins.T, np.zeros(count)
    value = _log_likelihood(wins, found)
    for _ in range(_STEPS):
        share = _win_probability(found)
        gradient = (wins - games * share).sum(axis=1)
        if np.abs(gradient).max() <= 1e-12 * games.sum():
            break
        weight = games * share * share.T
        # The ones fix the mean, along which the likelihood is flat.
        step = np.linalg.solve(np.diag(weight.sum(axis=1)) - weight + weight.max(), gradient)
        step -= step.mean()
        for _ in range(_HALVINGS):
            higher = _log_likelihood(wins, found + step)
            if higher >= value:
                break
            step = step / 2
        else:  # no step rises any more: this is the mode, to rounding
            break
        found, value = found + step, higher
    return found - found.mean()


def _win_probability(found: np.ndarray) -> np.ndarray:
    """P(i beats j), [G, G]."""
    return np.exp(-np.logaddexp(0.0, found[None, :] - found[:, None]))


def _log_likelihood(wins: np.ndarray, found: np.ndarray) -> float:
    return float(-(wins * np.logaddexp(0.0, found[None, :] - found[:, None])).sum())
