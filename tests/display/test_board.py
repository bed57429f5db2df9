"""What a display says, as a function of a run's state."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.display.board import (
    ARROWS,
    PHASES,
    Board,
    Scores,
    Work,
    live_lines,
    remaining,
    row_trend,
    scores_text,
    trend_text,
    waiting_line,
    work_text,
)
from flowrl.display.units import duration
from flowrl.run.telling import planned


def board(**given: object) -> Board:
    result = Board(total=10, start=2, iteration=2)
    result.add_work(Work(PHASES["iteration"], 100.0))
    for name, value in given.items():
        setattr(result, name, value)
    return result


@given(st.integers(1, 1000), st.integers(0, 1000), st.floats(0.001, 1e6))
def test_the_time_left_is_that_of_the_rest_at_the_pace_so_far(done: int, more: int, seconds: float):
    left = remaining(done, done + more, seconds)
    assert left == pytest.approx(seconds / done * more)


def test_the_run_is_timed_from_its_first_iteration_of_this_call_and_counts_no_resumed_ones():
    run = Board(total=10, start=2, iteration=2)
    assert run.run_left(1000.0) is None
    run.add_work(Work("evaluating base", 0.0, 4))
    assert run.began is None  # the base's evaluation is no part of the pace
    run.add_work(Work(PHASES["iteration"], 100.0))
    run.iteration = 4
    assert run.run_left(120.0) == pytest.approx(60.0)
    run.iteration = 10
    assert run.run_left(120.0) is None


def test_the_time_left_is_that_of_a_run_whose_iterations_and_evaluations_keep_their_pace():
    total, every, step, image, few, many = 7, 2, 10.0, 0.5, 4, 20
    one, world = SimpleNamespace(samples_per_prompt=1), SimpleNamespace(size=1)
    evaluator: Any = SimpleNamespace(prompts=[0] * many, options=one, world=world)
    options: Any = SimpleNamespace(every=every, periodic_prompts=few)
    coming = planned(evaluator, options, total)
    run = Board(total=total, coming=coming)
    run.add_evaluation(None, many, many * image)  # the base's
    run.add_work(Work(PHASES["iteration"], 0.0))
    now, ends = 0.0, total * step + (total - 1) // every * few * image + many * image
    for iteration in range(1, total):
        now += step
        if iteration % every == 0:
            work = Work(PHASES["evaluation"], now)
            run.add_work(work)
            now += few * image
            if iteration > every:  # while it is made, a second less is left after each second
                then, after = run.run_left(now - 1.5), run.run_left(now - 0.5)
                assert then is not None
                assert after == pytest.approx(then - 1.0)
            run.works.remove(work)
            run.add_evaluation(None, few, few * image)
        run.iteration = iteration
        assert run.run_left(now) == pytest.approx(ends - now)
    resumed = Board(total=total, start=2, iteration=2, coming=coming)
    resumed.add_work(Work(PHASES["iteration"], 0.0))
    resumed.iteration = 3
    assert resumed.evaluations_left() is None
    assert live_lines(resumed, 10.0, 99)[0].endswith("40 s left without evaluations")


@given(st.lists(st.floats(-1e3, 1e3), max_size=30))
def test_the_trend_of_rows_is_a_difference_of_means_of_equally_many(values: list[float]):
    trend = row_trend(values)
    if not values:
        assert trend is None
        return
    size = max(1, min(5, len(values) // 2))
    assert trend is not None
    assert trend[0] == pytest.approx(sum(values[-size:]) / size)
    if len(values) > 1:
        assert trend[1] == pytest.approx(trend[0] - sum(values[-2 * size : -size]) / size)


def test_iterations_without_a_number_do_not_count():
    assert row_trend([math.nan, 1.0, math.nan, 2.0]) == (2.0, 1.0)
    assert row_trend([math.nan]) is None


def test_evaluations_of_other_prompts_are_not_compared():
    few, many = [Scores((n,), "x", mean) for n, mean in ((4, 1.0), (4, 3.0))], Scores((64,), "x", 2.0)
    assert scores_text([few[0], many, few[1]]) == "x 3.000 ^ +2.000"
    assert scores_text([*few, many]) == "x 2.000"


@pytest.mark.parametrize(("change", "arrow"), [(0.1, 0), (-0.1, 1), (0.0, 2), (1e-5, 2)])
def test_the_arrow_is_that_of_the_difference_that_stands_after_it(change: float, arrow: int):
    assert f" {ARROWS[arrow]} " in trend_text("reward", 0.5, change, ARROWS)


def test_an_inner_phase_is_shown_once_it_lasts_and_the_hidden_one_never():
    state = board()
    state.add_work(Work("iteration 3: sampling", 100.0, 64, 12))
    state.add_work(Work(PHASES["rollout"], 100.1))
    assert live_lines(state, 109.0, 79)[-1].startswith("iteration 3: sampling [###")
    state.works[-1] = Work(PHASES["reward"], 109.0)
    assert "sampling" in live_lines(state, 109.1, 79)[-1]
    assert live_lines(state, 111.0, 79)[-1] == "scoring  2 s"


def test_a_plain_line_names_the_iteration_and_the_wait():
    state = board()
    state.add_work(Work("scoring", 100.0))
    assert waiting_line(state, state.works[-1], 131.0) == "iteration 3: scoring, 31 s"
    counted = Work("iteration 3: sampling", 100.0, 64, 16)
    assert waiting_line(state, counted, 110.0) == "iteration 3: sampling 16/64, 10 s, 30 s left"
    state.works.clear()
    assert waiting_line(state, Work("loading", 0.0), 5.0) == "loading, 5 s"


@given(st.integers(1, 200), st.integers(0, 10), st.floats(0, 1e5))
def test_no_line_is_wider_than_the_terminal(width: int, done: int, now: float):
    state = board(iteration=done, scores=[Scores((1,), "held-out brightness", float(k)) for k in range(4)])
    state.values.extend([0.5, 0.7])
    state.add_work(Work("iteration 3: sampling", 0.0, 64, 12))
    lines = live_lines(state, now, width)
    assert lines
    assert max(map(len, lines)) <= width


def test_numbers_that_do_not_fit_into_one_line_take_two():
    state = board(scores=[Scores((1,), "held-out brightness", mean) for mean in (0.1, 0.2, 0.4)])
    state.values.extend([0.5, 0.7])
    wide, narrow = live_lines(state, 100.0, 120), live_lines(state, 100.0, 66)
    assert wide[1] == "reward 0.700 ^ +0.200   held-out brightness 0.400 ^ +0.200 (since the first +0.300)"
    assert narrow[1:3] == wide[1].split("   ")


def test_seconds_are_words_of_two_units_at_most():
    assert [duration(s) for s in (-1.0, 59.4, 59.6, 3600, 86_399)] == [
        "0 s", "59 s", "1 min 0 s", "1 h 0 min", "23 h 59 min",
    ]  # fmt: skip
    assert "left" not in work_text(Work("scoring", 0.0, 4, 4), 3.0)
