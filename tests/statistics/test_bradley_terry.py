"""Bradley-Terry strengths: closed form, an independent optimiser, symmetries, samples without a comparison."""

import numpy as np
import pytest
from scipy import optimize

from flowrl.statistics.bradley_terry import strengths


def table(seed: int, count: int, share: float = 0.5) -> np.ndarray:
    """Random wins and ties, some pairs never compared, each sample compared at least once."""
    rng = np.random.default_rng(seed)
    wins = rng.integers(0, 4, (count, count)) * (rng.random((count, count)) < share) / 2.0
    np.fill_diagonal(wins, 0.0)
    for i in range(count):
        wins[i, (i + 1) % count] += 1.0
    return wins


@pytest.mark.parametrize("prior", [0.01, 0.5, 4.0])
@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 7), (3, 2), (1.5, 1.5), (1000, 0)])
def test_two_samples_have_their_closed_form(first, second, prior):
    found = strengths(np.array([[0, first], [second, 0]]), prior)
    difference = np.log((first + prior / 2) / (second + prior / 2))
    # The gradient ends at 1e-12 of all comparisons, and a sweep's curvature is prior / 2 of them.
    np.testing.assert_allclose(found, [difference / 2, -difference / 2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_strengths_are_those_of_an_independent_optimiser(seed):
    count, prior = 3 + seed, 0.5
    wins = table(seed, count)
    given = wins + prior / (2 * (count - 1)) * (1 - np.eye(count))

    def loss(s: np.ndarray) -> float:
        # The square fixes the mean and is 0 at the answer.
        total = sum(given[i, j] * np.log1p(np.exp(s[j] - s[i])) for i in range(count) for j in range(count))
        return float(total + s.mean() ** 2)

    other = optimize.minimize(loss, np.zeros(count), method="BFGS", options={"gtol": 1e-9}).x
    # BFGS with differences of 1e-8 knows its gradient to about 1e-7.
    np.testing.assert_allclose(strengths(wins, prior), other, atol=1e-5)


def test_the_order_of_samples_does_not_matter_and_exchanged_votes_change_the_sign():
    wins = table(1, 6)
    order = np.random.default_rng(0).permutation(6)
    found = strengths(wins)
    np.testing.assert_allclose(strengths(wins[np.ix_(order, order)]), found[order], atol=1e-9)
    np.testing.assert_allclose(strengths(wins.T), -found, atol=1e-9)
    np.testing.assert_allclose(found.mean(), 0.0, atol=1e-12)


def test_a_sample_without_a_vote_is_nan_and_stands_in_nobodys_way():
    wins = table(2, 5)
    wide = np.zeros((7, 7))
    rows = [0, 2, 3, 5, 6]
    wide[np.ix_(rows, rows)] = wins
    found = strengths(wide)
    assert np.isnan(found[[1, 4]]).all()
    np.testing.assert_allclose(found[rows], strengths(wins), atol=1e-12)
    assert np.isnan(strengths(np.zeros((3, 3)))).all()
    assert np.isnan(strengths(np.zeros((1, 1)))).all()


def test_a_clean_sweep_is_finite_and_in_its_order_and_ties_alone_are_equal():
    sweep = np.triu(np.full((8, 8), 50.0), 1)
    found = strengths(sweep, prior=0.1)
    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
    np.testing.assert_allclose(strengths(np.full((4, 4), 0.5)), 0.0, atol=1e-12)


def test_two_halves_that_were_never_compared_are_joined_by_the_prior():
    wins = np.zeros((4, 4))
    wins[0, 1] = wins[2, 3] = 1.0
    np.testing.assert_allclose(strengths(wins), strengths(wins)[[2, 3, 0, 1]], atol=1e-9)


@pytest.mark.parametrize(
    ("wins", "prior", "message"),
    [
        (np.zeros((2, 3)), 0.5, "square"),
        (np.array([[0, -1], [0, 0]]), 0.5, "from 0"),
        (np.array([[0, np.nan], [0, 0]]), 0.5, "finite"),
        (np.zeros((2, 2)), 0.0, "prior=0.0 must be above 0"),
    ],
)
def test_what_is_no_table_of_wins_is_refused(wins, prior, message):
    with pytest.raises(ValueError, match=message):
        strengths(wins, prior)
