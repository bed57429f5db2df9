"""The transitions of all samplers against their formulas and published numbers.

What every sampler must satisfy is proven in tests/contracts/test_samplers.py: Euler without noise, the closed form of
the velocity gain, refusals of VP models. Moments of Gaussian data are propagated, nothing is drawn.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch import Tensor
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_alphas_cumprod, vp_schedule
from flowrl.core import registry
from flowrl.core.types import Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import FlowProcess, Process, VPProcess
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.samplers import cps, ddim
from flowrl.samplers.base import Sampler, StepDistribution
from flowrl.samplers.sage import unit_variance
from tests import toys
from tests.toys import column

FLOW, VP = FlowProcess(), VPProcess()
SDE = ("flow_sde", "dance_sde", "wan_sde", "memoryless", "sage")


def build(name: str, **options: float | str) -> Sampler:
    module = registry.load("samplers", name)
    return module.build(module.Config(**options))


def make_step(sigma: float, sigma_next: float, level: float, *, ceiling: float = 0.96) -> Step:
    """One step of a flow."""
    return toys.make_step(FLOW, sigma, sigma_next, level, ceiling)


def linspace_schedule(num_steps: int, shift: float = 1.0) -> Schedule:
    sigmas = shifted_linspace(num_steps, shift)
    return Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


def grid_steps(schedule: Schedule, level: float, *, still_last: bool = False, process: Process = FLOW) -> Step:
    """Every step of a grid as one batch."""
    count = len(schedule)
    levels = (level,) * (count - 1) + (0.0 if still_last else level,)
    return StepPlan(schedule, levels, ()).steps(torch.arange(count), process)


def transition(sampler: Sampler, x: Tensor, v: Tensor, step: Step) -> StepDistribution:
    return sampler.transition(FLOW, FLOW.predict(v, x, step.sigma, "velocity"), x, step)


def noise_pair(*shape: int) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind(0)
    return first, second


# ---- single steps


@pytest.mark.parametrize(
    ("name", "level", "mean", "std"),
    [
        ("flow_sde", 0.7, 0.6305, 0.626099),
        ("dance_sde", 0.3, 0.887625, 0.134164),
        ("wan_sde", 1.0, 0.818898, 0.343460),
        ("memoryless", 1.0, -0.2, 1.264911),
        ("sage", 0.5, 0.815241, 0.351125),
        ("cps", 0.8, 0.443951, 0.570634),
        ("ddim", 1.0, 0.4875, 0.556215),
        ("ode", 0.0, 0.9, 0.0),
    ],
)
def test_one_step_worked_out_by_hand(name, level, mean, std):
    """x 1, v 0.5, sigma 0.8 -> 0.6: an SDE's mean is 0.9 - std^2 / 1.6 * 1.1; DDIM has r = 0.375."""
    found = transition(build(name), torch.ones(1, 3), torch.full((1, 3), 0.5), make_step(0.8, 0.6, level))
    assert_close(found.mean, torch.full((1, 3), mean), rtol=0, atol=1e-5)
    assert_close(found.std, column(std), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "level", "stds"),
    [
        ("flow_sde", 0.7, [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063]),
        ("cps", 0.8, [0.913, 0.869, 0.816, 0.752, 0.673, 0.573, 0.442, 0.264, 0.0085, 0.0]),
    ],
)
def test_stds_on_the_sd35_grid(name, level, stds):
    """Shift 3, 10 steps."""
    step = grid_steps(flow_schedule(10), level)
    found = transition(build(name), *noise_pair(10, 2), step).std
    assert_close(found, column(*stds), rtol=0, atol=5.1e-4)
    # The smallest one has four decimals.
    assert float(found[found > 0].min()) == pytest.approx(min(std for std in stds if std > 0), abs=5.1e-5)


@settings(max_examples=60, deadline=None)
@given(after=st.floats(0.05, 0.99), level=st.floats(0, 1.4))
def test_at_sigma_one_the_std_of_flow_sde_is_the_noise_level(after, level):
    """std a, mean (1 - a^2 / 2) x + v dt: the drift uses the true 1 - sigma, which is 0."""
    x, v = torch.full((1, 4), 0.7), torch.full((1, 4), -0.4)
    found = transition(build("flow_sde"), x, v, make_step(1.0, after, level, ceiling=after))
    # 1 / (1 - after) and 1 - after cancel up to three float32 roundings.
    assert_close(found.std, column(level), rtol=5e-7, atol=0)
    assert_close(found.mean, (1 - level**2 / 2) * x + v * (after - 1), rtol=1e-5, atol=1e-6)


def test_the_bound_acts_at_sigma_one_only():
    x = torch.ones(1, 3)
    for sigma, bounded in ((1.0, True), (0.9, False)):
        tight, wide = (
            transition(build("flow_sde"), x, x, make_step(sigma, 0.7, 0.7, ceiling=ceiling)) for ceiling in (0.8, 0.99)
        )
        assert bool(tight.std < wide.std) == bounded
        assert torch.equal(tight.mean, wide.mean) != bounded


@pytest.mark.parametrize("name", ["flow_sde", "memoryless"])
def test_a_start_at_sigma_one_needs_the_second_sigma_as_bound(name):
    step = make_step(1.0, 0.9, 0.7, ceiling=1.0)
    with pytest.raises(ValueError, match="sigma_ceiling"):
        build(name).velocity_gain(step)
    with pytest.raises(ValueError, match="sigma_ceiling"):
        transition(build(name), *noise_pair(1, 2), step)


@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_ddim_needs_no_bound_at_sigma_one(eta):
    """r = 0 there: std eta sigma'."""
    found = transition(build("ddim"), torch.ones(1, 3), torch.full((1, 3), 0.5), make_step(1.0, 0.9, eta))
    assert_close(found.std, column(eta * 0.9), rtol=1e-6, atol=0)
    assert_close(found.mean, torch.full((1, 3), 0.05 + 0.9 * math.sqrt(1 - eta**2)), rtol=1e-5, atol=0)


def test_where_the_grid_ends_the_ddim_form_has_no_noise_and_the_sdes_keep_theirs():
    """At sigma' = 0, CPS gives x0_hat and std 0; an SDE's last noise is g sqrt(sigma)."""
    x, v = noise_pair(1, 4)
    for name, level in (("cps", 0.8), ("ddim", 1.0), ("ode", 0.0)):
        found = transition(build(name), x, v, make_step(0.25, 0.0, level))
        assert found.std.tolist() == [0.0]
        assert_close(found.mean, x - 0.25 * v)
        with pytest.raises(ValueError, match="std 0"):
            found.log_prob(x, build(name).log_prob_form)
    # a sigma_L / sqrt(1 - sigma_L) = 0.202.
    found = transition(build("flow_sde"), x, v, make_step(0.25, 0.0, 0.7))
    assert_close(found.std, column(0.7 * 0.25 / math.sqrt(0.75)), rtol=1e-6, atol=0)
    found = transition(build("sage"), x, v, make_step(0.25, 0.0, 0.7))
    assert_close(found.std, column(0.7 * math.sqrt(-math.log(0.75) - 0.25)), rtol=1e-6, atol=0)


def test_wan_sde_has_no_strength_but_on_and_off():
    with pytest.raises(ValueError, match=r"noise_level=0\.5 must be 1 \(on\) or 0 \(off\)"):
        transition(build("wan_sde"), *noise_pair(1, 2), make_step(0.8, 0.6, 0.5))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("flow_sde", "noise_level", -0.1),
        ("dance_sde", "eta", -0.1),
        ("memoryless", "eta", -0.1),
        ("sage", "eta", -0.1),
        ("sage", "sigma_max", 1.0),
        ("sage", "sigma_max", 0.0),
        ("cps", "noise_level", -0.1),
        ("cps", "noise_level", 1.1),
        ("ddim", "eta", -0.1),
        ("ddim", "eta", 1.1),
    ],
)
def test_an_option_outside_its_range_is_refused_by_name(name, key, value):
    with pytest.raises(ValueError, match=f"{key}={value}"):
        build(name, **{key: value})


@pytest.mark.parametrize(
    ("name", "level"),
    [("dance_sde", 0.3), ("wan_sde", 1.0), ("memoryless", 1.0), ("sage", 0.5), ("cps", 0.8), ("ddim", 1.0)],
)
def test_defaults_are_the_published_ones(name, level):
    assert build(name).default_noise_level() == level
    assert build(name).log_prob_form == ("unscaled" if name == "cps" else "mean")


# ---- one kernel


@pytest.mark.parametrize(
    ("name", "level"), [("flow_sde", 0.7), ("dance_sde", 0.3), ("wan_sde", 1.0), ("memoryless", 1.0), ("sage", 0.5)]
)
def test_every_sde_is_euler_maruyama_with_its_own_variance(name, level):
    """mean = x + v dt - w / (2 sigma) eps_hat, std = sqrt(w), from sigma = 1 on; 1e-6 also where w cancels."""
    x, v = noise_pair(60, 4)
    step = grid_steps(flow_schedule(60), level)
    sigma, after, one = step.sigma.double(), step.sigma_next.double(), step.sigma[1].double()
    below = torch.where(sigma == 1, one, sigma)
    w = (
        level**2
        * {
            "flow_sde": sigma / (1 - below) * (sigma - after),
            "dance_sde": sigma - after,
            "wan_sde": (one * sigma) ** 2 * (sigma - after),
            "memoryless": 2 * sigma / (1 - below) * (sigma - after),
            "sage": ((1 - after) / (1 - sigma.clamp(max=0.997))).log() - (sigma - after),
        }[name]
    )
    found = transition(build(name), x, v, step)
    assert_close(found.std.double().square(), w, rtol=2e-6, atol=0)
    sigma, dt, w = sigma[:, None], (after - sigma)[:, None], w[:, None]
    mean = x + v * dt - w / (2 * sigma) * (x + (1 - sigma) * v)
    assert_close(found.mean, mean.float(), rtol=1e-5, atol=2e-6)


def as_written(name: str, x: Tensor, v: Tensor, sigma: Tensor, dt: Tensor) -> Tensor:
    """The mean in the words of the paper or its code, float64."""
    if name == "dance_sde":  # arXiv 2505.07818, eq. 7: the score
        score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
        return x + v * dt - 0.3**2 / 2 * score * dt
    if name == "flow_sde":  # yifan123/flow_grpo
        g = 0.7 * (sigma / (1 - sigma)).sqrt()
        return x * (1 + g**2 * dt / (2 * sigma)) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return x + (2 * v + x / (1 - sigma)) * dt  # arXiv 2409.08861: the memoryless drift


@pytest.mark.parametrize(("name", "level"), [("dance_sde", 0.3), ("flow_sde", 0.7), ("memoryless", 1.0)])
def test_the_kernel_is_the_published_expression(name, level):
    """Below sigma = 1."""
    x, v = noise_pair(9, 4)
    step = grid_steps(flow_schedule(10), level).at(torch.arange(1, 10))
    sigma, dt = step.sigma.double()[:, None], (step.sigma_next.double() - step.sigma.double())[:, None]
    # 1 / (1 - sigma) reaches 25 at sigma = 0.96, where 1 - sigma has lost 4 bits.
    expected = as_written(name, x.double(), v.double(), sigma, dt).float()
    assert_close(transition(build(name), x, v, step).mean, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
def test_ddim_on_a_flow_is_flow_sde_to_first_order(sigma):
    """a = sqrt(2) eta; the stds agree to O(h), the means to O(h^2)."""
    x, v, eta = torch.full((1, 1), 0.7), torch.full((1, 1), -0.4), 0.5
    stds, means = [], []
    for h in (0.02, 0.01):
        one = transition(build("ddim"), x, v, make_step(sigma, sigma - h, eta))
        other = transition(build("flow_sde"), x, v, make_step(sigma, sigma - h, math.sqrt(2) * eta))
        stds.append(abs(float(one.std / other.std) - 1))
        means.append(abs(float(one.mean - other.mean)))
    assert stds[1] < 0.1
    assert stds[0] / stds[1] == pytest.approx(2, abs=0.3)
    assert means[0] / means[1] == pytest.approx(4, abs=0.8)


# ---- moments of Gaussian data


@dataclass(frozen=True)
class Moments:
    mean: float
    std: float
    inflation: tuple[float, ...]
    """Variance over the path's own after each step that ends above sigma = 0."""
    memory: float
    """Weight of the initial noise in the final sample."""

    @property
    def correlation(self) -> float:
        """Of the initial noise with the final sample."""
        return self.memory / self.std


def propagate(
    sampler: Sampler,
    schedule: Schedule,
    level: float,
    *,
    data: tuple[float, float] = (1.0, 0.5),
    still_last: bool = False,
) -> Moments:
    """Moments of x after all steps, for data N(mean, std^2), the exact velocity and x ~ N(0, 1) at the start.

    Every step is affine in x, so its mean at x = 0 and x = 1 tells all; the recursion is in float64.
    """
    centre, spread = data
    step = grid_steps(schedule, level, still_last=still_last)
    sigma = step.sigma.double()[:, None]
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(len(schedule), 2)
    keep = (1 - sigma) * spread**2 / (((1 - sigma) * spread) ** 2 + sigma**2)
    x0_hat = centre + keep * (x - (1 - sigma) * centre)
    law = transition(sampler, x.float(), ((x - x0_hat) / sigma).float(), step)
    offset = law.mean[:, 0].double()
    factor = law.mean[:, 1].double() - offset
    mean, variance, memory, inflation = 0.0, 1.0, 1.0, []
    rows = zip(factor.tolist(), offset.tolist(), law.std.double().tolist(), step.sigma_next.tolist(), strict=True)
    for a, b, std, after in rows:
        mean, variance, memory = a * mean + b, a * a * variance + std * std, a * memory
        if after > 0:
            inflation.append(variance / (((1 - after) * spread) ** 2 + after**2))
    return Moments(mean, math.sqrt(variance), tuple(inflation), memory)


COUNTS = (5, 10, 20, 40, 80, 160, 320, 1280)
UNIFORM = [
    ("ode", 0.0, [-0.261, -0.138, -0.072, -0.036, -0.018, -0.009, -0.005, -0.001]),
    ("flow_sde", 0.7, [-0.080, -0.041, -0.017, -0.005, -0.0001, 0.002, 0.002, 0.002]),
    ("memoryless", 1.0, [0.047, 0.009, 0.002, 0.0005, 0.0001, 0.0, 0.0, 0.0]),
    ("dance_sde", 0.3, [-0.219, -0.117, -0.061, -0.031, -0.016, -0.008, -0.004, -0.001]),
    ("ddim", 0.495, [-0.276, -0.154, -0.084, -0.044, -0.023, -0.012, -0.006, -0.002]),
    ("ddim", 1.0, [-0.356, -0.227, -0.134, -0.075, -0.040, -0.021, -0.011, -0.003]),
    ("cps", 0.5, [-0.302, -0.200, -0.144, -0.114, -0.098, -0.089, -0.084, -0.079]),
    ("cps", 0.7, [-0.345, -0.260, -0.212, -0.185, -0.170, -0.161, -0.156, -0.150]),
    ("cps", 0.9, [-0.403, -0.338, -0.299, -0.275, -0.261, -0.253, -0.248, -0.243]),
]


@pytest.mark.parametrize(("name", "level", "errors"), UNIFORM)
def test_moments_on_a_uniform_grid_are_the_computed_ones(name, level, errors):
    """Relative error of the final std, three decimals; the mean has none."""
    found = [propagate(build(name), linspace_schedule(count), level) for count in COUNTS]
    assert [m.std / 0.5 - 1 for m in found] == pytest.approx(errors, abs=6e-4)
    assert [m.mean for m in found] == pytest.approx([1.0] * len(COUNTS), abs=1e-5)


SHARP = [
    ("ode", 0.0, False, [-0.868, -0.717, -0.489, -0.274, -0.144, -0.074, -0.010]),
    ("flow_sde", 0.7, False, [3.55, 1.11, 0.056, -0.119, -0.077, -0.042, -0.005]),
    ("flow_sde", 0.7, True, [-0.826, -0.639, -0.371, -0.167, -0.082, -0.043, -0.005]),
    ("memoryless", 1.0, False, [19.3, 6.11, 1.48, 0.132, 0.015, 0.0, -0.001]),
    ("dance_sde", 0.3, False, [0.99, 0.51, 0.12, -0.04, -0.04, -0.02, -0.003]),
    ("dance_sde", 0.3, True, [-0.87, -0.70, -0.43, -0.18, -0.07, -0.03, -0.003]),
    ("dance_sde", 1.0, True, [-0.83, -0.53, 0.15, 0.96, 0.84, 0.33, 0.03]),
    ("ddim", 0.495, False, [-0.868, -0.718, -0.493, -0.285, -0.160, -0.088, -0.013]),
    ("ddim", 1.0, False, [-0.869, -0.721, -0.512, -0.340, -0.228, -0.143, -0.025]),
    ("cps", 0.7, False, [-0.869, -0.721, -0.514, -0.353, -0.269, -0.221, -0.165]),
]


@pytest.mark.parametrize(("name", "level", "still_last", "errors"), SHARP)
def test_moments_of_sharp_data_on_a_shifted_grid_are_the_computed_ones(name, level, still_last, errors):
    """N(1, 0.1^2), shift 3, last step noisy or not; two or three decimals."""
    counts = (*COUNTS[:6], 1280)
    options = {"data": (1.0, 0.1), "still_last": still_last}
    found = [propagate(build(name), linspace_schedule(count, 3.0), level, **options).std for count in counts]
    assert [std / 0.1 - 1 for std in found] == pytest.approx(errors, abs=7e-3)


@pytest.mark.parametrize("level", [0.5, 0.7, 0.9, 1.0])
def test_cps_tends_to_the_wrong_std(level):
    """The limit is cos(a pi / 4) of the true std; first order, 1280 steps."""
    found = propagate(build("cps"), linspace_schedule(1280), level).std / 0.5
    assert found == pytest.approx(math.cos(level * math.pi / 4), rel=6e-3)


CORRELATIONS = [
    ("ode", 0.0, [1.0, 1.0, 1.0, 1.0], 1e-4),
    ("flow_sde", 0.7, [0.229, 0.196, 0.147, 0.081], 6e-4),
    ("flow_sde", 1.0, [0.033, 0.027, 0.015, 0.004], 6e-4),
    ("memoryless", 1.0, [0.0006, 0.0, 0.0, 0.0], 6e-5),
    ("ddim", 0.495, [0.56, 0.37, 0.25, 0.13], 5.1e-3),
    ("ddim", 1.0, [0.0, 0.0, 0.0, 0.0], 1e-6),
    ("dance_sde", 0.3, [0.865, 0.865, 0.865, 0.865], 1e-2),
    ("dance_sde", 1.0, [0.2, 0.2, 0.2, 0.2], 1.5e-2),
    ("cps", 0.7, [0.010, 0.0, 0.0, 0.0], 6e-4),
]


@pytest.mark.parametrize(("name", "level", "expected", "tolerance"), CORRELATIONS)
def test_correlations_of_start_and_end_are_the_computed_ones(name, level, expected, tolerance):
    """Uniform grids of 10, 40, 160 and 2000 steps, deterministic last step; ranges by their middle."""
    found = [propagate(build(name), linspace_schedule(n), level, still_last=True) for n in (10, 40, 160, 2000)]
    assert [m.correlation for m in found] == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("level", "excess"), [(0.7, 0.06), (0.9, 0.164), (math.sqrt(2), 1.0)])
def test_the_first_step_at_sigma_one_raises_the_variance_by_a_fourth_of_a_to_the_four(level, excess):
    """1 + a^4 / 4 for every schedule; here next to no step beyond it, 5000 of them."""
    for shift in (1.0, 3.0):
        found = propagate(build("flow_sde"), linspace_schedule(5000, shift), level).inflation[0]
        assert found - 1 == pytest.approx(level**4 / 4, abs=2e-3)
        assert found - 1 == pytest.approx(excess, abs=3e-3)


@pytest.mark.parametrize(
    ("name", "level", "worst", "tolerance"),
    [
        ("flow_sde", 0.7, 0.046, 1e-3),
        ("memoryless", 1.0, 0.42, 6e-3),
        ("ddim", 0.495, 0.0, 2e-3),
        ("ddim", 1.0, 0.0, 2e-3),
        ("dance_sde", 0.3, 0.0006, 1e-4),
    ],
)
def test_the_bound_at_sigma_one_shows_in_the_marginals_on_the_way(name, level, worst, tolerance):
    """The largest error of std along 2000 steps; laws without a bound have none."""
    inflation = propagate(build(name), linspace_schedule(2000), level).inflation
    assert max(abs(math.sqrt(ratio) - 1) for ratio in inflation) == pytest.approx(worst, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "level", "ratio", "peak"),
    [
        ("sage", 0.7, 1.002, 1.046),
        ("flow_sde", 0.7, 1.004, 1.099),
        ("dance_sde", 0.3, 0.994, 1.0),
        ("ode", 0.0, 0.994, 1.0),
    ],
)
def test_marginals_of_unit_gaussian_data(name, level, ratio, peak):
    """c = 1, 200 steps, shift 1: final std ratio and peak variance inflation."""
    found = propagate(build(name), linspace_schedule(200), level, data=(0.0, 1.0))
    assert found.std == pytest.approx(ratio, abs=6e-4)
    assert max(found.inflation) == pytest.approx(peak, abs=6e-4)


# ---- CPS


@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
def test_cps_keeps_the_noise_of_a_point_mass_at_sigma(level):
    """x0 constant and exact v give Var(x') = sigma'^2 after every step, for any a."""
    found = propagate(build("cps"), flow_schedule(10), level, data=(0.3, 0.0))
    assert found.inflation == pytest.approx([1.0] * 9, abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(level=st.floats(0, 1), sigma=st.floats(0.01, 1), share=st.floats(0, 0.99))
def test_cps_splits_the_noise_without_loss(level, sigma, share):
    """Nothing under a root can turn negative; std^2 + direction^2 = sigma'^2."""
    step = make_step(sigma, sigma * share, level)
    found = transition(build("cps"), torch.ones(1, 2), torch.ones(1, 2), step)
    weight = cps.direction(step)
    assert bool((weight >= 0).all() & (found.std >= 0).all())
    assert bool(found.mean.isfinite().all())
    # A square below the smallest normal number has few digits.
    least = torch.finfo(torch.float32).tiny
    assert_close(found.std.square() + weight.square(), step.sigma_next.square(), rtol=1e-6, atol=least)


def test_cps_at_strength_one_redraws_all_noise():
    """x' = (1 - sigma') x0_hat + sigma' z, a consistency step."""
    x, v = noise_pair(1, 4)
    found = transition(build("cps"), x, v, make_step(0.8, 0.6, 1.0))
    assert cps.direction(make_step(0.8, 0.6, 1.0)).tolist() == [0.0]
    assert_close(found.std, column(0.6))
    assert_close(found.mean, 0.4 * (x - 0.8 * v))


@pytest.mark.parametrize("name", ["cps", *SDE, "ddim"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_noise_times_the_gain(name):
    """d log p / d v = z * d mean / d v over D std, for CPS 2 s z d mean / d v over D."""
    sampler, shape = build(name), (9, 2, 3)
    step = grid_steps(flow_schedule(10), sampler.default_noise_level())
    step = step.at(torch.arange(9))
    x, v = noise_pair(*shape)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    old = transition(sampler, x, v, step)
    chosen = old.sample(z)
    v = v.clone().requires_grad_(True)
    log_prob = transition(sampler, x, v, step).log_prob(chosen, sampler.log_prob_form)
    assert torch.equal(log_prob.detach(), old.log_prob(chosen, sampler.log_prob_form))
    log_prob.sum().backward()
    scale = 2 * old.std if name == "cps" else 1 / old.std
    expected = (sampler.velocity_gain(step) * scale)[:, None, None] * z / 6
    # z is recovered from x' - mean: it loses bits as std falls to 6e-3.
    assert_close(v.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# ---- SAGE


def flow_variance(sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """w of Flow-SDE at eta = 1 below sigma = 1."""
    return sigma / (1 - sigma) * (sigma - sigma_next)


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0.02, 0.996), share=st.floats(0, 0.99))
def test_sage_variance_is_the_integral_and_less_than_that_of_flow_sde(sigma, share):
    """Quadrature of s / (1 - s) on [sigma', sigma] below the clamp."""
    start, end = torch.tensor([sigma], dtype=torch.float64), torch.tensor([sigma * share], dtype=torch.float64)
    w = float(unit_variance(start, end, 0.997))
    assert w == pytest.approx(quad(lambda s: s / (1 - s), sigma * share, sigma, epsabs=0, epsrel=1e-10)[0], rel=1e-6)
    assert w < float(flow_variance(start, end))


@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.9, 0.99])
def test_sage_tends_to_flow_sde_as_the_step_shrinks(sigma):
    """The ratio of the variances goes to 1, at first order in h."""
    start, h = torch.full((3,), sigma, dtype=torch.float64), 1e-3 * torch.tensor([1.0, 0.1, 0.01]).double()
    gap = 1 - unit_variance(start, start - h, 0.997) / flow_variance(start, start - h)
    # d log(s / (1 - s)) / ds = 1 / (s (1 - s)), and half of it is the mean over the step.
    assert_close(gap, h / (2 * sigma * (1 - sigma)), rtol=0.2, atol=0)


def test_sage_variances_on_a_shifted_grid():
    """Shift 5, 20 steps; at the first step the clamp makes SAGE noisier than Flow-SDE."""
    step = grid_steps(linspace_schedule(20, 5.0), 1.0)
    found = {name: transition(build(name), *noise_pair(20, 2), step).std[:5].square() for name in ("sage", "flow_sde")}
    assert_close(found["sage"], column(1.234, 0.724, 0.438, 0.321, 0.257), rtol=0, atol=6e-4)
    assert_close(found["flow_sde"], column(1.000, 1.076, 0.556, 0.383, 0.298), rtol=0, atol=6e-4)
    finer = transition(build("sage"), *noise_pair(40, 2), grid_steps(linspace_schedule(40, 5.0), 1.0))
    assert float(finer.std[0].square()) == pytest.approx(0.526, abs=6e-4)


@pytest.mark.parametrize(("shift", "most"), [(5.0, 67), (3.0, 111), (1.0, 332)])
def test_sage_refuses_a_grid_that_ends_its_first_step_above_the_clamp(shift, most):
    """It raises, and the longest grid that it takes is known."""
    sampler = build("sage")
    assert bool(sampler.velocity_gain(grid_steps(linspace_schedule(most, shift), 0.5)).isfinite().all())
    step = grid_steps(linspace_schedule(most + 1, shift), 0.5)
    message = rf"step 0 ends at sigma_next={float(step.sigma_next[0]):.6g}.*sigma_max=0\.997.*deterministic"
    with pytest.raises(ValueError, match=message):
        sampler.velocity_gain(step)
    with pytest.raises(ValueError, match=message):
        transition(sampler, *noise_pair(most + 1, 2), step)


def test_the_remedies_that_sage_names_work():
    """Raise sigma_max, or take the ODE at that step."""
    x, v = noise_pair(1, 4)
    wider = transition(build("sage", sigma_max=0.9995), x, v, make_step(1.0, 0.998, 0.5))
    assert bool(((wider.std > 0) & wider.std.isfinite()).all())
    still = transition(build("sage"), x, v, make_step(1.0, 0.998, 0.0))
    assert still.std.tolist() == [0.0]
    assert_close(still.mean, x - 0.002 * v)


@settings(max_examples=100, deadline=None)
@given(after=st.floats(0.99, 0.9999), sigma_max=st.floats(0.99, 0.9999))
def test_sage_is_positive_or_refused_next_to_one(after, sigma_max):
    sampler, step = build("sage", sigma_max=sigma_max), make_step(1.0, after, 0.5)
    try:
        std = transition(sampler, torch.ones(1, 2), torch.ones(1, 2), step).std
    except ValueError:
        # The variance is ln(q) - (1 - after) with q = (1 - after) / (1 - sigma_max).
        assert math.log((1 - after) / (1 - sigma_max)) <= 1 - after + 1e-4
        return
    assert bool(((std > 0) & std.isfinite()).all())


# ---- DDIM


def ddim_on_sd15(eta: float, x: Tensor, eps: Tensor) -> tuple[StepDistribution, Step]:
    step = grid_steps(vp_schedule(50), eta, process=VP)
    return ddim.build(ddim.Config(eta=eta)).transition(VP, VP.predict(eps, x, step.sigma, "eps"), x, step), step


def test_ddim_std_at_eta_one_is_the_published_one():
    """SD1.x, 50 steps; known to four decimals."""
    found, step = ddim_on_sd15(1.0, *noise_pair(50, 3))
    published = {981: 0.4545, 481: 0.2877, 181: 0.1771, 41: 0.0999, 21: 0.0395, 1: 0.0206}
    table = dict(zip(step.timestep.int().tolist(), found.std.tolist(), strict=True))
    assert {t: table[t] for t in published} == pytest.approx(published, abs=1e-4)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_the_step_of_diffusers_on_the_whole_grid(eta):
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    scheduler: Any = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.set_timesteps(50)
    x, eps = noise_pair(50, 3)
    z = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    found, step = ddim_on_sd15(eta, x, eps)
    assert step.timestep.tolist() == scheduler.timesteps.tolist()
    theirs = [
        scheduler.step(eps[k : k + 1], t, x[k : k + 1], eta=eta, variance_noise=z[k : k + 1]).prev_sample
        for k, t in enumerate(scheduler.timesteps)
    ]
    # x0_hat reaches |x| / alpha = 13 |x| at t = 981; diffusers' cumprod is float32.
    assert_close(found.sample(z), torch.cat(theirs), rtol=1e-4, atol=1e-4)
    assert bool((found.std > 0).all()) == (eta > 0)


def test_ddim_at_eta_one_is_the_ddpm_posterior():
    """q(x' | x, x0_hat) from Bayes' rule on the chain x' -> x."""
    x, eps = noise_pair(50, 3)
    found, step = ddim_on_sd15(1.0, x, eps)
    grid = torch.cat([step.timestep.long(), torch.zeros(1, dtype=torch.int64)])
    bar, bar_next = vp_alphas_cumprod()[grid[:-1]][:, None], vp_alphas_cumprod()[grid[1:]][:, None]
    x0_hat = (x - (1 - bar).sqrt() * eps) / bar.sqrt()
    keep = bar / bar_next
    precision = keep / (1 - keep) + 1 / (1 - bar_next)
    mean = (keep.sqrt() / (1 - keep) * x + bar_next.sqrt() / (1 - bar_next) * x0_hat) / precision
    assert_close(found.mean, mean.float(), rtol=1e-4, atol=1e-4)
    assert_close(found.std, precision.rsqrt().squeeze(1).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_the_general_ddim_std_is_the_published_one_on_vp(eta):
    """SD1.x at 50 steps; the published form cancels to 2e-5 at the last steps."""
    step = grid_steps(vp_schedule(50), eta, process=VP)
    assert_close(ddim.any_path_std(step), ddim.vp_std(step), rtol=3e-5, atol=0)


@pytest.mark.parametrize(("name", "level"), [("ode", 0.0), ("ddim", 0.5), ("ddim", 1.0), ("cps", 0.8)])
def test_a_vp_model_told_as_a_flow_takes_the_same_step(name, level):
    """Sigma -> s / (alpha + s), x -> x / (alpha + s), v = eps_hat - x0_hat."""
    x, eps = noise_pair(50, 4)
    step = grid_steps(vp_schedule(50), level, process=VP)
    prediction = VP.predict(eps, x, step.sigma, "eps")
    found = build(name).transition(VP, prediction, x, step)
    before, after = step.alpha + step.sigma, step.alpha_next + step.sigma_next
    sigma, sigma_next = step.sigma / before, step.sigma_next / after
    told = dataclasses.replace(
        step, sigma=sigma, sigma_next=sigma_next, alpha=FLOW.alpha(sigma), alpha_next=FLOW.alpha(sigma_next)
    )
    flow = transition(build(name), x / before[:, None], prediction.eps_hat - prediction.x0_hat, told)
    # x0_hat reaches 13 |x| at t = 981.
    assert_close(flow.mean * after[:, None], found.mean, rtol=1e-4, atol=1e-4)
    assert_close(flow.std * after, found.std, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["ddim", "cps"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_the_ddim_form_never_draws_more_noise_than_it_has(name, shift):
    """std^2 <= sigma'^2 on both families of flow grids and on VP, at every strength."""
    for level in (0.1, 0.5, 1.0):
        for count in (2, 10, 60):
            for schedule in (flow_schedule(count, shift), linspace_schedule(count, shift)):
                step = grid_steps(schedule, level)
                found = transition(build(name), *noise_pair(count, 2), step)
                assert bool((found.std <= step.sigma_next * (1 + 1e-6)).all())
            step = grid_steps(vp_schedule(count), level, process=VP)
            x, eps = noise_pair(count, 2)
            found = build(name).transition(VP, VP.predict(eps, x, step.sigma, "eps"), x, step)
            assert bool((found.std <= step.sigma_next * (1 + 1e-6)).all())
