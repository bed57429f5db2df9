"""Paired comparisons: against scipy, symmetry, ties, and what chance gives."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from flowrl.statistics import paired
from flowrl.statistics.intervals import interval

NAN = float("nan")
RNG = np.random.default_rng


def tables(prompts: int, seeds: int = 2, steps: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two tables of a coarse judge, with ties, a missing score and duplicated prompts."""
    rng = RNG(prompts)
    before, after = (rng.integers(1, steps + 1, size=(prompts, seeds)).astype(float) for _ in range(2))
    before[1, 0] = NAN
    return before, after, np.arange(prompts) % (prompts - 2)


@pytest.mark.parametrize("prompts", [12, 80])
def test_the_win_share_of_the_other_side_is_one_minus_it(prompts):
    before, after, groups = tables(prompts)
    here, there = paired.win_share(before, after, groups), paired.win_share(after, before, groups)
    assert here["mean"] + there["mean"] == pytest.approx(1.0)
    assert here["low"] + there["high"] == pytest.approx(1.0, abs=0.01)
    lower = paired.win_share(before, after, groups, higher_is_better=False)
    assert lower["mean"] == pytest.approx(there["mean"])


def test_win_rates_of_both_sides_sum_to_one_and_share_their_ties():
    before, after, groups = tables(80)
    here, there = paired.win_rate(before, after, groups), paired.win_rate(after, before, groups)
    assert here["rate"] + there["rate"] == pytest.approx(1.0)
    assert (here["wins"], here["ties"]) == (there["losses"], there["ties"])


def test_the_difference_of_equal_scores_has_no_interval_and_of_passes_and_wins_the_score_interval_of_none_of_n():
    table, groups = RNG(0).normal(size=(70, 2)), np.arange(70)
    change = paired.difference(table, table, groups)
    assert change["mean"] == 0.0
    assert np.isnan([change["low"], change["high"]]).all()
    reach = stats.binomtest(0, 70).proportion_ci(method="wilson").high
    passed = paired.difference(table > 0.0, (table > 0.0) * 1.0, groups)
    assert (passed["low"], passed["high"]) == (pytest.approx(-reach), pytest.approx(reach))
    share = paired.win_share(table, table, groups)
    assert (share["low"], share["high"]) == (pytest.approx(0.5 - reach / 2), pytest.approx(0.5 + reach / 2))
    # Tango (1998, section 3) with 0 discordant pairs: n^2 d^2 / (n |d| (1 - |d|)) is the square of the normal quantile.
    assert 70 * reach / (1 - reach) == pytest.approx(stats.norm.ppf(0.975) ** 2)


def test_half_a_judges_step_makes_its_small_changes_ties():
    before, after = np.asarray([[3.0], [3.0], [3.0]]), np.asarray([[3.4], [2.6], [4.0]])
    share = paired.win_share(before, after, np.arange(3), tie_eps=0.5)
    assert share["mean"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert paired.win_rate(before, after, np.arange(3), tie_eps=0.5)["ties"] == 2


def test_a_tie_is_a_share_of_the_bases_std_or_the_same_image_and_of_passes_an_equal_one():
    """Of 0, 4, 8 the std is the root of 32/3, and half of it 1.63."""
    before = np.asarray([[0.0, 4.0], [8.0, NAN]])
    margin = paired.margin(before, before + 100.0, 0.5)
    assert margin == pytest.approx(0.5 * (32 / 3) ** 0.5)
    after = before + np.asarray([[1.6, -1.7], [1.7, 9.0]])
    same = np.asarray([[False, True], [False, False]])
    np.testing.assert_array_equal(paired.outcomes(before, after, tie_eps=margin), [[0.5, 0.0], [1.0, NAN]])
    np.testing.assert_array_equal(paired.outcomes(before, after, tie_eps=margin, same=same), [[0.5, 0.5], [1.0, NAN]])
    found = paired.win_rate(before, after, np.arange(2), tie_eps=margin, same=same, higher_is_better=False)
    assert (found["wins"], found["losses"], found["ties"]) == (0, 1, 2)
    passed = np.asarray([[0.0, 1.0, NAN]])
    assert paired.margin(passed, 1.0 - passed, 10.0) == paired.TIE, "ten std would make all of them ties"
    assert paired.margin(passed, 0.5 * passed, 10.0) == 5.0
    assert paired.margin(before * NAN, before, 0.5) == paired.margin(0 * before, before, 0.5) == paired.TIE


@pytest.mark.parametrize(("decided", "ties"), [(6, 0), (6, 90), (60, 0)])
def test_prompts_that_all_win_do_not_make_a_certain_win_rate(decided, ties):
    after = np.concatenate([np.ones(decided), np.zeros(ties)])[:, None]
    found = paired.win_rate(np.zeros_like(after), after, np.arange(len(after)))
    assert found["rate"] == found["high"] == 1.0
    assert found["low"] == pytest.approx(stats.binomtest(decided, decided).proportion_ci(method="wilson").low)


@pytest.mark.parametrize("side", ["two-sided", "greater", "less"])
def test_sign_and_rank_tests_are_scipys_without_the_ties(side):
    change = np.concatenate([RNG(0).normal(0.4, 1.0, 30), np.zeros(9)])
    gains = int((change > 0).sum())
    assert paired.sign_test(change, side=side) == stats.binomtest(gains, 30, alternative=side).pvalue
    rank: Any = stats.wilcoxon(change[:30], alternative=side)
    assert paired.wilcoxon(change, side=side) == rank.pvalue
    assert paired.sign_test(np.zeros(4)) == paired.wilcoxon(np.zeros(4)) == 1.0


def test_the_flip_test_is_scipys_permutation_test_of_the_mean():
    columns = np.stack([RNG(0).normal(0.5, 1.0, 9), RNG(1).normal(0.0, 1.0, 9), np.zeros(9)])
    found = paired.flip_tests(columns, np.arange(9))
    for column, p in zip(columns, found, strict=True):
        # Above the 2^9 signs that there are, so that all of them are tried.
        exact = stats.permutation_test((column,), np.mean, permutation_type="samples", n_resamples=1000).pvalue
        # 10 000 draws scatter by 0.5 % at the most.
        assert p == pytest.approx(exact, abs=0.02)


def test_duplicates_do_not_make_a_flip_test_surer():
    change, groups = RNG(0).normal(0.3, 1.0, 40), np.arange(40)
    once = paired.flip_tests(change[None], groups)
    often = paired.flip_tests(np.repeat(change, 5)[None], np.repeat(groups, 5))
    assert once == pytest.approx(often)


def test_holms_steps_by_hand_and_never_below_the_plain_p():
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    p = RNG(0).random(20) ** 3
    adjusted = paired.holm(p.tolist())
    assert (adjusted >= p).all()
    assert (np.diff(adjusted[np.argsort(p)]) >= 0).all()
    assert adjusted.max() <= 1.0


def test_a_difference_pairs_each_seed():
    before, after = np.asarray([[0.0, 100.0], [1.0, 1.0]]), np.asarray([[1.0, NAN], [3.0, 3.0]])
    found = paired.difference(before, after, np.arange(2))
    assert found == interval(np.asarray([1.0, 2.0]))


def test_no_comparison_has_no_p_value():
    assert paired.flip_tests(np.empty((0, 5)), np.arange(5)).shape == (0,)
