"""Best of n from a pool: unbiased, by enumeration, and what every such curve obeys."""

import itertools

import numpy as np
import pytest

from flowrl.statistics.best_of import best_of, curves

VALUES, JUDGED = np.array([0.5, 1.0, 1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.25, 0.0, 1.0])


def enumerated(values: np.ndarray, judged: np.ndarray, count: int) -> float:
    """The mean over all sets of `count`, of each over its best ones."""
    found = []
    for chosen in map(list, itertools.combinations(range(len(values)), count)):
        best = [k for k in chosen if values[k] == max(values[chosen])]
        found.append(np.mean(judged[best]))
    return float(np.mean(found))


def test_best_of_n_is_the_mean_over_all_choices_with_ties_at_random():
    for count in range(1, 6):
        assert best_of(VALUES, JUDGED, count) == pytest.approx(enumerated(VALUES, JUDGED, count))
    for count in (0, 6):
        with pytest.raises(ValueError, match="there are 5"):
            best_of(VALUES, JUDGED, count)


@pytest.mark.parametrize("pool", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2])
def test_the_mean_over_all_pools_is_the_expectation_of_fresh_draws(pool, count):
    """Unbiased: a law of three images, drawn with replacement; pools of any size give what `count` draws give."""
    chance, values, judged = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 1.0]), np.array([0.3, -1.0, 2.0])

    def expected(size: int) -> float:
        draws = list(itertools.product(range(3), repeat=size))
        weights = [float(np.prod(chance[list(draw)])) for draw in draws]
        found = [best_of(values[list(draw)], judged[list(draw)], count) for draw in draws]
        return float(np.dot(weights, found))

    assert expected(pool) == pytest.approx(expected(count), abs=1e-12)


def test_a_curve_begins_at_the_mean_rises_when_its_chooser_judges_and_ends_at_the_best():
    table = np.random.default_rng(0).normal(size=(20, 8))
    found = curves(table, table)
    assert found.shape == (20, 8)
    np.testing.assert_allclose(found[:, 0], table.mean(axis=1))
    np.testing.assert_allclose(found[:, -1], table.max(axis=1))
    assert (np.diff(found, axis=1) >= -1e-12).all()
    order = np.random.default_rng(1).permutation(8)
    np.testing.assert_allclose(curves(table[:, order], table[:, order]), found)
    np.testing.assert_allclose(curves(5 * table - 1, table), found)


def test_a_chooser_that_says_nothing_leaves_the_mean_and_one_that_errs_lowers_it():
    judged = np.random.default_rng(0).normal(size=(3, 4))
    np.testing.assert_allclose(curves(np.zeros((3, 4)), judged), np.tile(judged.mean(axis=1)[:, None], 4))
    np.testing.assert_allclose(curves(-judged, judged)[:, -1], judged.min(axis=1))


def test_a_prompt_without_one_score_has_no_curve():
    values, judged = np.ones((3, 2)), np.ones((3, 2))
    values[0, 1] = judged[1, 0] = np.nan
    assert np.isnan(curves(values, judged)).tolist() == [[True, True], [True, True], [False, False]]
