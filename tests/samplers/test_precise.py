"""Precise-SDE: the published table, its limits to other samplers, and that two steps are one."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.diffusion.process import VPProcess
from tests.samplers.test_transitions import (
    FLOW,
    build,
    grid_steps,
    linspace_schedule,
    make_step,
    noise_pair,
    propagate,
    transition,
)
from tests.toys import column

VP = VPProcess()


def law(name: str, step, process=FLOW, **options):
    """(mean, std) from noise and an output, on a path."""
    x, raw = noise_pair(len(step.sigma), 3)
    prediction = process.predict(raw, x, step.sigma, "velocity" if process is FLOW else "eps")
    found = build(name, **options).transition(process, prediction, x, step)
    return found.mean, found.std


def test_one_step_worked_out_by_hand():
    """x 1, v 0.5, sigma 0.8 -> 0.6: r = 0.375, x0_hat 0.6, eps_hat 1.1."""
    x, v = torch.ones(1, 3), torch.full((1, 3), 0.5)
    for schedule, level, kept in (("flow", 1.5, 0.375**2.25), ("dance", 0.3, math.exp(-0.09 * (1 / 0.6 - 1 / 0.8)))):
        found = transition(build("precise", schedule=schedule), x, v, make_step(0.8, 0.6, level))
        mean = torch.full((1, 3), 0.4 * 0.6 + 0.6 * math.sqrt(kept) * 1.1)
        assert_close(found.mean, mean, rtol=1e-5, atol=0)
        assert_close(found.std, column(0.6 * math.sqrt(1 - kept)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "level", "ratios"),
    [
        ("ode", 0.0, [0.586, 0.739, 0.863, 0.929]),
        ("precise", 0.7, [0.574, 0.717, 0.839, 0.912]),
        ("precise", 1.5, [0.542, 0.653, 0.767, 0.855]),
        ("cps", 0.7, [0.549, 0.655, 0.736, 0.783]),
    ],
)
def test_the_spread_of_gaussian_data_is_the_computed_one(name, level, ratios):
    """Of data N(0, 0.25), shift 3, at 6, 10, 20 and 40 steps, over the true one; three decimals."""
    found = [propagate(build(name), linspace_schedule(n, 3.0), level, data=(0.0, 0.5)).std for n in (6, 10, 20, 40)]
    assert [std / 0.5 for std in found] == pytest.approx(ratios, abs=6e-4)


@pytest.mark.parametrize(("schedule", "level"), [("flow", 0.7), ("flow", 1.5), ("dance", 0.3)])
def test_it_rises_to_the_true_spread_and_never_adds_noise_beyond_it(schedule, level):
    """Less than the ODE's at every number of steps, where an Euler-Maruyama step overshoots."""
    sampler, before = build("precise", schedule=schedule), 0.0
    for count in (6, 20, 80, 320):
        found, still = (
            propagate(each, linspace_schedule(count, 3.0), noise, data=(0.0, 0.5))
            for each, noise in ((sampler, level), (build("ode"), 0.0))
        )
        assert before < found.std < still.std < 0.5
        assert max(found.inflation) < 1 + 1e-5
        before = found.std
    assert before > 0.48


@pytest.mark.parametrize("process", [FLOW, VP], ids=["flow", "vp"])
def test_at_eta_root_2_it_is_ddims_ancestral_step(process):
    grid = flow_schedule(20) if process is FLOW else vp_schedule(50)
    own, ddim = (
        law(name, grid_steps(grid, level, process=process), process)
        for name, level in (("precise", math.sqrt(2)), ("ddim", 1.0))
    )
    # r^2 by a power and by a product; on VP ddim's published form cancels to 3e-5, and x0_hat reaches 13.
    assert_close(own[0], ddim[0], rtol=1e-5, atol=2e-6 if process is FLOW else 2e-5)
    assert_close(own[1], ddim[1], rtol=2e-6 if process is FLOW else 3e-5, atol=1e-7)


@pytest.mark.parametrize("eta", [0.7, 1.5])
def test_it_is_the_first_order_step_of_the_sa_solver_with_half_the_square_as_tau(eta):
    """x' = e^(-tau^2 h) sigma' / sigma x + alpha' (1 - e^(-(1 + tau^2) h)) x0_hat, tau^2 = eta^2 / 2, float64."""
    step = grid_steps(flow_schedule(12), eta).at(torch.arange(1, 11))
    sigma, after, tau2 = step.sigma.double(), step.sigma_next.double(), eta**2 / 2
    h = ((1 - after) / after).log() - ((1 - sigma) / sigma).log()
    x, v = (each.double() for each in noise_pair(10, 3))
    clean = x - sigma[:, None] * v
    mean = ((-tau2 * h).exp() * after / sigma)[:, None] * x + ((1 - after) * (1 - (-(1 + tau2) * h).exp()))[
        :, None
    ] * clean
    found = law("precise", step)
    assert_close(found[0], mean.float(), rtol=1e-5, atol=1e-6)
    assert_close(found[1], (after * (1 - (-2 * tau2 * h).exp()).sqrt()).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("schedule", "other", "level"), [("flow", "flow_sde", 0.7), ("dance", "dance_sde", 0.3)])
@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
def test_as_the_step_shrinks_it_is_the_sde_that_it_integrates(schedule, other, level, sigma):
    """The stds agree to O(h), the means to O(h^2)."""
    x, v = torch.full((1, 1), 0.7), torch.full((1, 1), -0.4)
    stds, means = [], []
    for h in (0.02, 0.01):
        one = transition(build("precise", schedule=schedule), x, v, make_step(sigma, sigma - h, level))
        two = transition(build(other), x, v, make_step(sigma, sigma - h, level))
        stds.append(abs(float(one.std / two.std) - 1))
        means.append(abs(float(one.mean - two.mean)))
    assert stds[1] < 0.1
    assert stds[0] / stds[1] == pytest.approx(2, abs=0.35)
    assert means[1] < means[0] / 3 + 1e-6  # some roundings of numbers of size 1


@pytest.mark.parametrize("schedule", ["flow", "dance"])
@pytest.mark.parametrize("level", [0.3, 1.5])
def test_two_steps_with_the_same_clean_prediction_are_exactly_one(schedule, level):
    """Mean and variance compose, which CPS fails: its share does not know how long a step is."""

    def moments(name: str, sigma: float, after: float, mean: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """Of the step from x ~ N(mean, .) where x0_hat is held at 0.3: mean, weight of x, std."""
        clean = torch.full((1, 2), 0.3)
        sampler = build(name, **({"schedule": schedule} if name == "precise" else {}))
        found = transition(
            sampler, mean, (mean - clean) / sigma, make_step(sigma, after, level if name != "cps" else 0.5)
        )
        moved = transition(
            sampler, mean + 1, (mean + 1 - clean) / sigma, make_step(sigma, after, level if name != "cps" else 0.5)
        )
        return found.mean, float((moved.mean - found.mean)[0, 0]), float(found.std)

    for name in ("precise", "cps"):
        x = torch.full((1, 2), 0.9)
        whole, _, std = moments(name, 0.8, 0.4, x)
        middle, _, first = moments(name, 0.8, 0.6, x)
        twice, weight, second = moments(name, 0.6, 0.4, middle)
        same = math.hypot(weight * first, second) == pytest.approx(std, rel=1e-5)
        assert (same and torch.allclose(twice, whole, rtol=1e-5)) == (name == "precise")


@pytest.mark.parametrize("schedule", ["flow", "dance"])
def test_pure_noise_and_clean_data_need_no_bound(schedule):
    x, v = noise_pair(1, 4)
    sampler = build("precise", schedule=schedule)
    last = transition(sampler, x, v, make_step(0.25, 0.0, 1.5))
    assert last.std.tolist() == [0.0]
    assert_close(last.mean, x - 0.25 * v)
    with pytest.raises(ValueError, match="std 0"):
        last.log_prob(x)
    first = transition(sampler, x, v, make_step(1.0, 0.7, 1.5))
    assert bool(first.mean.isfinite().all())
    if schedule == "flow":  # nothing of pure noise is kept
        assert_close(first.std, column(0.7))
        assert_close(first.mean, 0.3 * (x - v))
    still = transition(sampler, x, v, make_step(1.0, 0.0, 0.0))
    assert still.std.tolist() == [0.0]
    assert_close(still.mean, x - v)


def test_the_gain_is_the_published_number():
    assert_close(build("precise").velocity_gain(make_step(0.8, 0.7, 1.5)), column(-0.16365), rtol=0, atol=5e-6)


def test_defaults_are_the_published_ones():
    sampler = build("precise")
    assert (sampler.default_noise_level(), sampler.log_prob_form, sampler.order) == (1.5, "mean", 1)
    assert (sampler.clip_range("ratio_norm"), sampler.clip_range("plain")) == (4e-6, 1e-4)
    with pytest.raises(ValueError, match=r"eta=-0\.1"):
        build("precise", eta=-0.1)
