"""Measures of sets of images: the values of sets that are known."""

import numpy as np
import pytest

from flowrl.statistics.sets import kid, precision_recall, vendi


def drawn(seed: int, count: int, shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 16)) + shift


def test_kid_of_one_law_is_0_on_average_also_of_few_and_grows_with_a_shift():
    found = [kid(drawn(seed, 12), drawn(1000 + seed, 20)) for seed in range(800)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(800)
    levels = [kid(drawn(0, 200), drawn(1, 200, shift)) for shift in (0.0, 0.3, 0.6)]
    assert levels == sorted(levels)
    assert levels[2] > 10 * abs(levels[0])
    assert kid(drawn(0, 9), drawn(1, 7)) == pytest.approx(kid(drawn(1, 7), drawn(0, 9)))


def test_vendi_counts_different_images():
    assert vendi(np.tile(drawn(0, 1), (7, 1))) == pytest.approx(1)
    assert vendi(np.diag([1.0, 2, 3, 4])) == pytest.approx(4)
    assert vendi(np.repeat(np.eye(3), 4, axis=0)) == pytest.approx(3)
    assert vendi(5 * drawn(0, 30)[::-1]) == pytest.approx(vendi(drawn(0, 30)))


def test_equal_sets_cover_each_other_a_part_is_precise_and_far_ones_do_neither():
    whole = drawn(0, 100)
    assert precision_recall(whole, whole[::-1]) == (1, 1)
    precision, recall = precision_recall(whole[:20], whole)
    assert precision == 1
    assert precision_recall(whole, whole[:20]) == (recall, precision)
    spread = precision_recall(0.01 * drawn(2, 20), whole)
    assert spread[1] < 0.1
    assert precision_recall(whole, whole + 100) == (0, 0)
