"""Windows that move from iteration to iteration, per-sample steps, and the shortened grid behind a window."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import SampleId
from flowrl.diffusion.flash import flash, flash_schedule
from flowrl.diffusion.schedules import Schedule, shift_sigmas, shifted_linspace
from flowrl.diffusion.windows import MixWindow, mix_window, random_window, step_subsets, subset

NAN = float("nan")


def mix_schedule(num_steps: int, shift: float = 3.0) -> Schedule:
    sigmas = shifted_linspace(num_steps, shift)
    return Schedule(sigmas, 1000 * sigmas[:-1])


# ---- Flow-GRPO-Fast


def test_starts_of_a_random_window_are_uniform_and_move_between_iterations():
    """hi - lo - w + 1 values, each drawn about equally often."""
    windows = [random_window(10, 3, 1, 8, seed=0, iteration=k) for k in range(1, 1501)]
    assert all(w == tuple(range(w[0], w[0] + 3)) for w in windows)
    starts, counts = np.unique([w[0] for w in windows], return_counts=True)
    assert starts.tolist() == [1, 2, 3, 4, 5]
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 300).max() < 5 * (1500 * 0.2 * 0.8) ** 0.5
    assert len({random_window(10, 3, 1, 8, seed=s, iteration=1) for s in range(30)}) == 5
    assert {random_window(6, 3, 0, 3, seed=0, iteration=k) for k in range(1, 20)} == {(0, 1, 2)}  # the only place


@pytest.mark.parametrize(
    "draw",
    [
        lambda k: random_window(10, 2, 0, 5, seed=3, iteration=k),
        lambda k: subset(10, 3, seed=3, iteration=k),
        lambda k: mix_window(MixWindow(strategy="random"), 25, seed=3, iteration=k),
    ],
    ids=["random_window", "subset", "mix_window"],
)
def test_all_ranks_and_a_resumed_run_draw_the_same_window(draw):
    """Nothing but the run's seed and the iteration enters, no global generator."""
    first = [draw(k) for k in range(1, 20)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert [draw(k) for k in reversed(range(1, 20))] == first[::-1]
    assert len(set(first)) > 3


def test_a_subset_is_drawn_without_order_from_its_pool():
    """Flow-Factory's steps are not necessarily neighbours; default pool: all but the last."""
    draws = [subset(10, 3, seed=0, iteration=k, steps=[7, 1, 3, 5]) for k in range(1, 200)]
    assert set(draws) == {(1, 3, 5), (1, 3, 7), (1, 5, 7), (3, 5, 7)}
    assert subset(5, 4, seed=0, iteration=1) == (0, 1, 2, 3)


# ---- DanceGRPO


IDS = [SampleId(slot, sample) for slot in range(3) for sample in range(4)]


def test_every_sample_keeps_its_own_share_of_the_trained_steps():
    """16 steps, the last dropped, fraction 0.6: the first 9 of a permutation of 15, per sample."""
    mask = step_subsets(IDS, range(15), 0.6, seed=0, iteration=1)
    assert mask.shape == (12, 15)
    assert mask.dtype == torch.bool
    assert mask.sum(1).tolist() == [9] * 12
    assert len({tuple(row) for row in mask.tolist()}) == 12
    assert not torch.equal(mask, step_subsets(IDS, range(15), 0.6, seed=0, iteration=2))
    assert not torch.equal(mask, step_subsets(IDS, range(15), 0.6, seed=1, iteration=1))
    assert bool(step_subsets(IDS, range(5), 1.0, seed=0, iteration=1).all())


def test_the_steps_of_a_sample_follow_it_to_any_rank():
    mask = step_subsets(IDS, range(9), 0.5, seed=0, iteration=4)
    chosen = [7, 2, 11]
    assert torch.equal(step_subsets([IDS[i] for i in chosen], range(9), 0.5, seed=0, iteration=4), mask[chosen])


def test_every_step_is_kept_equally_often():
    """4 of 8 steps, 12 samples, 100 iterations: 600 of 1200 each, five standard deviations."""
    total = torch.cat([step_subsets(IDS, range(8), 0.5, seed=0, iteration=k) for k in range(1, 101)]).sum(0)
    assert (total - 600).abs().max() < 5 * 300**0.5


# ---- MixGRPO


def sequence(config: MixWindow, num_steps: int, count: int) -> list[tuple[int, ...]]:
    return [mix_window(config, num_steps, seed=0, iteration=k) for k in range(1, count + 1)]


def released(config: MixWindow, num_steps: int, count: int) -> list[tuple[int, ...]]:
    """As a counter that runs along, empty windows included."""
    start, counter, limit, windows = 0, 0, num_steps - 2, []
    for _ in range(count):
        windows.append(tuple(range(start, min(start + config.size, limit))))
        counter += 1
        if counter >= config.stay(start, limit):
            counter = 0
            start += config.shift if config.overlap else config.size
            if start > limit:
                start = 0 if config.roll_back else limit
    return windows


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shift": 2}, [(0, 1, 2)] * 2 + [(2, 3, 4)] * 2 + [(4, 5)] * 2 + [(5,)] * 4),
        ({"shift": 2, "roll_back": True}, [(0, 1, 2), (0, 1, 2), (2, 3, 4), (2, 3, 4), (4, 5), (4, 5)] * 2),
        ({"overlap": False}, [(0, 1, 2)] * 2 + [(3, 4, 5)] * 2 + [(5,)] * 4),
        ({"overlap": False, "roll_back": True}, [(0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5)] * 2),
        ({"shift": 0}, [(0, 1, 2)] * 8),
        ({"strategy": "frozen"}, [(0, 1, 2)] * 8),
        ({"size": 9, "shift": 4}, [(0, 1, 2, 3, 4, 5)] * 2 + [(4, 5)] * 2 + [(5,)] * 2),
    ],
)
def test_the_window_slides_as_the_table_says(options, expected):
    """8 steps, so X = 6; w 3, tau 2 unless said otherwise."""
    config = MixWindow(**{"size": 3, "interval": 2} | options)
    assert sequence(config, 8, len(expected)) == expected


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        # int(4 (1 - l / 4) + l / 4) for l = 0 .. 3
        ({"strategy": "decay", "longest": 4, "shortest": 1}, [4, 3, 2, 1]),
        # ceil(4 exp(-max(0, l - 1) / 2))
        ({"strategy": "exp_decay", "interval": 4, "rate": 0.5, "threshold": 1}, [4, 4, 3, 2]),
    ],
)
def test_a_decaying_window_stays_shorter_where_it_is_cleaner(options, stays):
    """tau(l) of both decays, by hand for 6 steps (X = 4)."""
    config = MixWindow(size=1, roll_back=True, **options)
    expected = [(place,) for place, stay in enumerate(stays) for _ in range(stay)]
    assert sequence(config, 6, 2 * len(expected)) == 2 * expected


@pytest.mark.parametrize("strategy", ["progressive", "decay", "exp_decay"])
@pytest.mark.parametrize("options", [{"shift": 1}, {"shift": 3}, {"overlap": False}])
def test_the_sequence_is_the_released_one_without_its_empty_windows(strategy, options):
    """Rolling back, over several rounds of 25 steps; the released code has empty windows."""
    config = MixWindow(strategy=strategy, interval=3, roll_back=True, **options)
    theirs = [w for w in released(config, 25, 400) if w]
    assert sequence(config, 25, len(theirs)) == theirs


@pytest.mark.parametrize("interval", [1, 20, 25])
def test_without_rolling_back_only_the_empty_windows_differ_and_none_is_empty(interval):
    config = MixWindow(interval=interval)
    ours, theirs = sequence(config, 25, 700), released(config, 25, 700)
    assert all(a == (b or (22,)) for a, b in zip(ours, theirs, strict=True))
    assert any(not w for w in theirs)


@pytest.mark.parametrize(("interval", "last"), [(25, 11), (20, 14)])
def test_the_published_runs_are_reproduced_exactly(interval, last):
    """In 300 iterations of 25 steps the start is 0..11 (tau 25) or 0..14 (tau 20)."""
    config = MixWindow(interval=interval)
    windows = sequence(config, 25, 300)
    assert windows == released(config, 25, 300)
    assert sorted({w[0] for w in windows}) == list(range(last + 1))
    assert {len(w) for w in windows} == {4}


def test_a_random_mix_window_is_full_and_takes_every_place():
    """The start uniform in [0, X - w]; a window wider than the range takes all of it."""
    windows = sequence(MixWindow(strategy="random", size=3), 9, 300)
    assert set(windows) == {(start, start + 1, start + 2) for start in range(5)}
    assert set(sequence(MixWindow(strategy="random", size=9), 9, 20)) == {tuple(range(7))}


@pytest.mark.parametrize("strategy", ["progressive", "random", "decay", "exp_decay", "frozen"])
def test_no_window_is_ever_empty_or_trains_the_last_two_steps(strategy):
    """For every number of steps."""
    for num_steps in range(3, 12):
        for w in sequence(MixWindow(strategy=strategy, interval=1, longest=2), num_steps, 60):
            assert w == tuple(range(w[0], w[-1] + 1))
            assert w[-1] < num_steps - 2


# ---- MixGRPO-Flash


def test_flash_counts_are_the_published_ones():
    """Ratio 0.4, tau 20: 11 evaluations at first, 20 at l = 14, 15.6 on average; Flash* takes 7."""
    full, config = mix_schedule(25), MixWindow(interval=20)
    counts = [len(flash_schedule(full, w[-1], 0.4, 3.0)) for w in sequence(config, 25, 300)]
    assert (counts[0], counts[-1]) == (11, 20)
    assert sum(counts) / 300 == pytest.approx(15.6, abs=0.05)
    (frozen,) = set(sequence(MixWindow(strategy="frozen"), 25, 30))
    assert len(flash_schedule(full, frozen[-1], 0.2, 3.0)) == 7


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("schedule", [mix_schedule(25), flow_schedule(10)], ids=["mixgrpo", "sd3"])
def test_the_flash_grid_starts_behind_the_window_and_always_ends_at_0(schedule, ratio):
    """For every window end, also where the released code stops at one node and stays noisy."""
    num_steps = len(schedule)
    for last in range(num_steps - 1):
        short = flash_schedule(schedule, last, ratio, 3.0)
        assert torch.equal(short.sigmas[: last + 2], schedule.sigmas[: last + 2])
        assert torch.equal(short.timesteps[: last + 2], schedule.timesteps[: last + 2])
        assert short.sigmas[-1] == 0
        assert len(short) == last + max(int((num_steps - last) * ratio), 2)


def test_the_flash_nodes_are_those_of_the_released_code():
    """linspace(1 - (e + 1) / S, 0, n), shifted; S 25, e 3, ratio 0.4: n = 8."""
    expected = shift_sigmas(torch.linspace(1 - 4 / 25, 0, 8), 3.0)
    short = flash_schedule(mix_schedule(25), 3, 0.4, 3.0)
    assert_close(short.sigmas[4:], expected, rtol=0, atol=1e-6)
    assert_close(short.timesteps, 1000 * short.sigmas[:-1])
    assert short.sigmas.dtype == short.timesteps.dtype == torch.float32


@pytest.mark.parametrize("shift", [1.0, 2.0, 5.0])
def test_flash_refuses_another_shift_than_the_grids_own_and_names_it(shift):
    """After the window the nodes would follow another curve than the model's."""
    for schedule in (mix_schedule(25), flow_schedule(10)):
        with pytest.raises(ValueError, match=f"shift={shift:g} is not .* own grid; it is about (2.9|3)"):
            flash_schedule(schedule, 3, 0.4, shift)


def test_a_flash_plan_is_stochastic_in_its_window_and_solved_after_it():
    plan = flash(mix_schedule(12), 0.7, (2, 3), ratio=0.5, shift=3.0, solver="dpm2_heun")
    # e = 3, n = int(9 * 0.5) = 4
    assert len(plan) == 7
    assert plan.train == (2, 3)
    assert plan.noise_level == (0.0, 0.0, 0.7, 0.7, 0.0, 0.0, 0.0)
    assert plan.solver == ("ode",) * 4 + ("dpm2_heun",) * 3


# ---- refusals


SIGMAS = shifted_linspace(25, 3.0)


@pytest.mark.parametrize(
    ("draw", "arguments", "message"),
    [
        (random_window, (10, 0, 0, 5), "size 0 is empty"),
        (random_window, (10, -1, 0, 5), "size -1 is empty"),
        (random_window, (10, 4, 2, 5), "4 steps does not fit between steps 2 and 5"),
        (random_window, (10, 2, -1, 5), "does not fit between steps -1 and 5"),
        (random_window, (10, 2, 0, 10), "could hold the last of 10 steps.*must end at 9"),
        (random_window, (10, 2, 0, 12), "could hold the last of 10 steps"),
        (subset, (10, 0), r"cannot draw 0 of 9 steps: give a number in 1\.\.9"),
        (subset, (10, 10), "cannot draw 10 of 9"),
        (partial(subset, steps=[3, 9]), (10, 1), r"step 9 cannot be drawn: of 10 steps, 0\.\.8"),
        (partial(subset, steps=[-1]), (10, 1), "step -1 cannot be drawn"),
        *((step_subsets, (IDS, range(5), fraction), "of 5 trained steps") for fraction in (0.0, -0.5, 0.1, 1.1, NAN)),
        (mix_window, (MixWindow(), 2), "2 steps leave none, give at least 3"),
    ],
)
def test_a_window_refuses_what_is_empty_or_outside_or_holds_the_last_step(draw, arguments, message):
    """A window ends at T - 1 at most, else the sharp last step is trained."""
    with pytest.raises(ValueError, match=message):
        draw(*arguments, seed=0, iteration=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mix_window(MixWindow(), 9, seed=0, iteration=0), "count from 1"),
        (lambda: MixWindow(size=0), "size=0 must be at least 1"),
        (lambda: MixWindow(shift=-1), "shift=-1 must be at least 0"),
        (lambda: MixWindow(interval=0), "interval=0"),
        (lambda: MixWindow(shortest=0), "shortest=0"),
        (lambda: MixWindow(rate=-0.1), r"rate=-0\.1"),
        (lambda: MixWindow(longest=2, shortest=3), "longest=2 must not be below shortest=3"),
        (lambda: flash_schedule(Schedule(SIGMAS, SIGMAS[:-1]), 6, 0.4, 3.0), "timesteps are not 1000 sigma"),
        (lambda: flash_schedule(vp_schedule(10), 3, 0.4, 3.0), "only a flow grid"),
        (lambda: flash_schedule(mix_schedule(25), -1, 0.4, 3.0), r"ends at step -1: of 25 steps .* in 0\.\.23"),
        (lambda: flash_schedule(mix_schedule(25), 24, 0.4, 3.0), "ends at step 24"),
        (lambda: flash_schedule(mix_schedule(25), 3, 0.0, 3.0), r"it must be in \(0, 1\]"),
        (lambda: flash_schedule(mix_schedule(25), 3, 1.2, 3.0), r"kept steps is 1\.2"),
        (lambda: flash_schedule(mix_schedule(25), 3, NAN, 3.0), r"\(0, 1\]"),
        (lambda: flash(mix_schedule(12), 0.7, (), ratio=0.5, shift=3.0), "empty"),
        (lambda: flash(mix_schedule(12), 0.7, (11,), ratio=0.5, shift=3.0), "last step"),
        (lambda: flash(mix_schedule(12), 0.7, (12,), ratio=0.5, shift=3.0), r"only steps 0\.\.11"),
    ],
)
def test_options_out_of_range_and_grids_that_flash_cannot_continue_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
