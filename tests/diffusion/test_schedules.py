"""Sigma grids against published numbers and against diffusers' own scheduler."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.diffusion.schedules import Schedule, flow_match_euler, shift_sigmas, shifted_linspace

SD35_10_STEPS = [1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0]
FLUX_512_6_STEPS = [1, 0.90374, 0.7897, 0.65249, 0.48422, 0.273, 0]


def test_sd35_grid_of_ten_steps_is_the_published_one():
    """Known to five decimals."""
    assert_close(flow_match_euler(10, 3.0), torch.tensor(SD35_10_STEPS), rtol=0, atol=5.1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 10, 28, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_static_grids_are_those_of_diffusers(num_steps, shift):
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    # diffusers computes in float32, flowrl in float64: a few units of 2^-24.
    assert_close(flow_match_euler(num_steps, shift), scheduler.sigmas, rtol=0, atol=5e-7)


def test_flux_grid_at_512_pixels_is_the_published_one_and_that_of_diffusers():
    """1024 tokens, mu 0.63, six steps from linspace(1, 1/6, 6)."""
    import numpy as np
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    grid = torch.cat([shift_sigmas(torch.linspace(1, 1 / 6, 6), math.exp(0.63)), torch.zeros(1)])
    assert_close(grid, torch.tensor(FLUX_512_6_STEPS), rtol=0, atol=5.1e-6)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 6, 6), mu=0.63)
    assert_close(grid, scheduler.sigmas, rtol=0, atol=5e-7)


@settings(max_examples=100, deadline=None)
@given(sigma=st.floats(0, 1), first=st.floats(0.1, 10), second=st.floats(0.1, 10))
def test_shifts_compose_and_are_undone_by_their_inverse(sigma, first, second):
    at = torch.tensor([sigma], dtype=torch.float64)
    assert_close(shift_sigmas(shift_sigmas(at, first), second), shift_sigmas(at, first * second))
    assert_close(shift_sigmas(shift_sigmas(at, first), 1 / first), at)


@pytest.mark.parametrize("grid", [flow_match_euler, shifted_linspace])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_grids_run_from_noise_to_exactly_clean_without_standing_still(grid, shift):
    for num_steps in (2, 3, 10, 40, 1000):
        sigmas = grid(num_steps, shift)
        assert sigmas.shape == (num_steps + 1,)
        assert sigmas.dtype == torch.float32
        assert sigmas[0] == 1
        assert sigmas[-1] == 0
        assert bool((sigmas.diff() < 0).all())


def test_dance_grid_is_the_shifted_line():
    """t = linspace(1, 0, S + 1), sigma = shift t / (1 + (shift - 1) t)."""
    expected = [3 * t / (1 + 2 * t) for t in (1, 0.75, 0.5, 0.25, 0)]
    assert_close(shifted_linspace(4, 3.0), torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("sigmas", "count", "message"),
    [
        ([1.0, 0.5, 0.0], 3, "3 timesteps need 4 sigmas, got 3"),
        *((sigmas, 2, "fall strictly") for sigmas in ([1.0, 1.0, 0.0], [1.0, 0.5, 0.6], [1.0, float("nan"), 0.0])),
    ],
)
def test_a_schedule_refuses_timesteps_that_do_not_fit_and_sigmas_that_do_not_fall(sigmas, count, message):
    with pytest.raises(ValueError, match=message):
        Schedule(sigmas=torch.tensor(sigmas), timesteps=torch.zeros(count))
