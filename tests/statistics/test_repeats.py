"""Training seeds of one recipe and a judge's own noise."""

import numpy as np
import pytest
from scipy import stats

from flowrl.statistics.repeats import noise_floor, over_seeds


def layout(rng: np.random.Generator, seeds: int, prompts: int, sd: tuple[float, float, float]) -> np.ndarray:
    """Differences [R, P] round 0: by seed, by prompt, and by both."""
    by_seed, by_prompt, rest = sd
    one, other = by_seed * rng.normal(size=(seeds, 1)), by_prompt * rng.normal(size=(1, prompts))
    return one + other + rest * rng.normal(size=(seeds, prompts))


def test_the_spread_is_that_of_the_seed_means_and_their_t_interval_scipys():
    columns, groups = layout(np.random.default_rng(0), 3, 60, (0.3, 0.0, 1.0)), np.arange(60)
    found, means = over_seeds(columns, groups), columns.mean(axis=1)
    assert found["mean"] == pytest.approx(means.mean())
    assert found["sd"] == pytest.approx(means.std(ddof=1))
    low, high = stats.t.interval(0.95, 2, means.mean(), stats.sem(means))
    assert (found["low_seeds"], found["high_seeds"]) == (pytest.approx(low), pytest.approx(high))


def test_the_intervals_of_two_seeds_end_at_the_bounds():
    columns = np.stack([np.repeat([0.0, 1.0], [20, 40]), np.repeat([0.0, 1.0], [10, 50])])
    free, found = (over_seeds(columns, np.arange(60), bounds) for bounds in (None, (0.0, 1.0)))
    assert min(free["high"], free["high_seeds"]) > 1.0
    assert (found["low"], found["high"]) == (max(free["low"], 0.0), 1.0)
    assert (found["low_seeds"], found["high_seeds"]) == (max(free["low_seeds"], 0.0), 1.0)


def test_one_seed_has_the_interval_over_prompts_and_no_spread():
    columns, groups = np.random.default_rng(0).normal(size=(1, 60)), np.arange(60)
    found = over_seeds(columns, groups)
    assert (found["low"], found["high"]) == (found["low_prompts"], found["high_prompts"])
    assert np.isnan([found["sd"], found["low_seeds"]]).all()


def test_the_interval_over_both_is_that_of_the_two_way_layout_by_its_mean_squares():
    columns = layout(np.random.default_rng(2), 12, 60, (0.3, 1.0, 2.0))
    found, (seeds, prompts) = over_seeds(columns, np.arange(60)), columns.shape
    by_seed = prompts * columns.mean(axis=1).var(ddof=1)
    by_prompt = seeds * columns.mean(axis=0).var(ddof=1)
    rest = columns - columns.mean(axis=1)[:, None] - columns.mean(axis=0) + columns.mean()
    own = (rest**2).sum() / ((seeds - 1) * (prompts - 1))
    squares, freedoms = np.asarray([by_seed, by_prompt, -own]), np.asarray([11, 59, 11 * 59])
    assert squares.sum() > max(by_seed, by_prompt)
    freedom = squares.sum() ** 2 / (squares**2 / freedoms).sum()
    half = stats.t.ppf(0.975, freedom) * np.sqrt(squares.sum() / columns.size)
    assert found["high"] - found["mean"] == pytest.approx(half)
    assert found["mean"] - found["low"] == pytest.approx(half)


def test_seeds_that_agree_leave_the_error_over_prompts():
    columns = np.repeat(np.random.default_rng(0).normal(size=(1, 400)), 3, axis=0)
    found = over_seeds(columns, np.arange(400))
    width = found["high_prompts"] - found["low_prompts"]
    assert found["high"] - found["low"] == pytest.approx(width, rel=0.05)
    assert found["sd"] == pytest.approx(0.0, abs=1e-12)


def test_a_prompt_that_one_seed_could_not_score_is_left_out_in_all():
    columns = np.random.default_rng(0).normal(size=(3, 61))
    holed = columns.copy()
    holed[1, 60] = np.nan
    assert over_seeds(holed, np.arange(61)) == over_seeds(columns[:, :60], np.arange(60))


@pytest.mark.parametrize("sd", [(0.2, 0.0, 1.0), (0.0, 1.0, 0.5), (0.1, 1.0, 1.0)], ids=["seeds", "prompts", "both"])
def test_the_interval_over_seeds_and_prompts_covers_the_recipes_mean(monkeypatch, sd):
    monkeypatch.setattr("flowrl.statistics.intervals.BOOTSTRAP", 10)
    rng, hits = np.random.default_rng(0), 0
    for _ in range(500):
        found = over_seeds(layout(rng, 3, 60, sd), np.arange(60))
        hits += found["low"] <= 0.0 <= found["high"]
    # 500 runs scatter by 1 %; the largest of three variances is never left out, so it may cover more than 97 %.
    assert 0.92 <= hits / 500 <= 0.995


def test_the_noise_of_a_judge_is_found_from_two_passes():
    rng, quality = np.random.default_rng(0), np.random.default_rng(1).normal(size=(400, 4))
    first, second = (quality + 0.2 * rng.normal(size=quality.shape) for _ in range(2))
    found = noise_floor(first, second, np.arange(400))
    assert found["n"] == 1600
    assert found["sd"] == pytest.approx(0.2, rel=0.1)
    assert found["sd_of_mean"] == pytest.approx(0.2 / 40, rel=0.15)
    assert found["floor"] == pytest.approx(1.96 * np.sqrt(2) * found["sd_of_mean"], rel=1e-3)
    assert abs(found["shift"]) < 3 * np.sqrt(2) * found["sd_of_mean"]


def test_seeds_that_agree_on_every_prompt_are_no_more_certain_than_their_prompts():
    found = over_seeds(np.ones((3, 10)), np.arange(10), (0.0, 1.0))
    assert (found["low"], found["high"]) == (found["low_prompts"], found["high_prompts"])
    assert found["low"] < found["high"] == 1.0
