"""Transition laws against the sheets' numbers, and the Gaussian they return."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_alphas_cumprod, vp_schedule
from flowrl.core import registry
from flowrl.core.types import Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.samplers import ddim, flow_sde, ode
from flowrl.samplers.base import StepDistribution
from flowrl.samplers.flow_sde import flow_sde_step
from tests.toys import column, make_step

FLOW, VP = FlowProcess(), VPProcess()


def all_steps(schedule, process, noise_level: float) -> Step:
    """Every step of a grid as one batch."""
    count = len(schedule)
    return StepPlan(schedule, (noise_level,) * count, ()).steps(torch.arange(count), process)


# ---- Flow-SDE and ODE


def test_flow_sde_takes_the_golden_step():
    """grpo_family 0.1 and 1.5.1: x 1, v 0.5, sigma 0.8 -> 0.6, a 0.7."""
    x, v = torch.ones(1, 3), torch.full((1, 3), 0.5)
    found = flow_sde.build(flow_sde.Config(noise_level=0.7)).transition(
        FLOW, FLOW.predict(v, x, column(0.8), "velocity"), x, make_step(FLOW, 0.8, 0.6, 0.7)
    )
    assert_close(found.mean, torch.full((1, 3), 0.6305), rtol=0, atol=1e-5)
    assert_close(found.std, column(0.626099), rtol=0, atol=1e-5)


def test_ode_takes_the_golden_step():
    """grpo_family 0.1 and 1.5.1: Euler of the same step gives 0.9 and no noise."""
    x, v = torch.ones(1, 3), torch.full((1, 3), 0.5)
    found = ode.build(ode.Config()).transition(
        FLOW, FLOW.predict(v, x, column(0.8), "velocity"), x, make_step(FLOW, 0.8, 0.6, 0.7)
    )
    assert_close(found.mean, torch.full((1, 3), 0.9), rtol=0, atol=1e-6)
    assert found.std.tolist() == [0.0]


def law_on_a_flow(name: str, x: torch.Tensor, v: torch.Tensor, step: Step) -> StepDistribution:
    module = registry.load("samplers", name)
    return module.build(module.Config()).transition(FLOW, FLOW.predict(v, x, step.sigma, "velocity"), x, step)


def takes_flows(name: str) -> bool:
    try:
        law_on_a_flow(name, torch.ones(1, 2), torch.ones(1, 2), make_step(FLOW, 0.8, 0.6, 0.0))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in registry.names("samplers") if takes_flows(name)])
def test_without_noise_every_flow_law_is_euler_on_the_whole_grid(name):
    """grpo_family 1.5.1: a = 0 is x + v dt to float32 rounding."""
    step = all_steps(flow_schedule(10), FLOW, 0.0)
    x, v = torch.randn(2, 10, 4, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    found = law_on_a_flow(name, x, v, step)
    euler = x + v * (step.sigma_next - step.sigma)[:, None, None]
    assert_close(found.mean, euler, rtol=0, atol=2e-6)
    assert found.std.tolist() == [0.0] * 10


def test_flow_sde_equals_the_expression_of_the_official_code_on_the_whole_grid():
    """grpo_family 0.1: mean = x (1 + g^2 dt / (2 s)) + v (1 + g^2 (1 - s) / (2 s)) dt."""
    step = all_steps(flow_schedule(10), FLOW, 0.7)
    x, v = torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    found = flow_sde.build(flow_sde.Config()).transition(FLOW, FLOW.predict(v, x, step.sigma, "velocity"), x, step)
    sigma, after = step.sigma.double()[:, None], step.sigma_next.double()[:, None]
    dt, bound = after - sigma, torch.where(sigma == 1, sigma[1], sigma)
    g = 0.7 * (sigma / (1 - bound)).sqrt()
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    assert_close(found.mean, mean.float(), rtol=1e-5, atol=2e-6)
    assert_close(found.std, (g * (-dt).sqrt()).squeeze(1).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_steps", "expected"), [(50, 0.484), (500, 0.499), (5000, 0.5001)])
def test_flow_sde_keeps_the_marginal_of_a_gaussian_as_the_grid_is_refined(num_steps, expected):
    """grpo_family 1.5.3: x0 ~ N(0, 0.5^2), exact v, a 0.7, shift 3; moments are propagated, nothing is drawn."""
    step = all_steps(flow_schedule(num_steps), FLOW, 0.7)
    variance = (1 - step.sigma) ** 2 * 0.25 + step.sigma**2
    x = torch.ones(num_steps, 1)  # the step is linear in x: its mean at x = 1 is the factor
    v = ((step.sigma - (1 - step.sigma) * 0.25) / variance)[:, None]
    found = flow_sde.build(flow_sde.Config()).transition(FLOW, FLOW.predict(v, x, step.sigma, "velocity"), x, step)
    spread = 1.0
    for factor, std in zip(found.mean.squeeze(1).tolist(), found.std.tolist(), strict=True):
        spread = factor**2 * spread + std**2
    # The sheet prints three decimals (four at 5000); float32 steps add less than 1e-4 over 5000 of them.
    assert math.sqrt(spread) == pytest.approx(expected, abs=6e-4 if num_steps < 5000 else 1.5e-4)


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0.02, 0.99), share=st.floats(0.05, 0.95), level=st.floats(0.05, 1.4))
def test_the_mean_moves_with_the_velocity_by_dt_times_one_plus_half_a_squared(sigma, share, level):
    """grpo_family 1.5.4, sigma < 1."""
    assert slope(sigma, sigma * share, level) == pytest.approx(1 + level**2 / 2, rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(after=st.floats(0.05, 0.95), level=st.floats(0.05, 1.4))
def test_at_sigma_one_the_mean_moves_with_the_velocity_by_exactly_dt(after, level):
    """grpo_family 1.5.4: the drift uses the true 1 - sigma, which is 0."""
    assert slope(1.0, after, level, ceiling=after) == pytest.approx(1.0, rel=1e-6)


def slope(sigma: float, after: float, level: float, ceiling: float = 0.96) -> float:
    """d mean / d v over dt."""
    v = torch.full((1, 1), 0.3, requires_grad=True)
    step = (column(sigma), column(after), column(level), column(ceiling))
    flow_sde_step(torch.full((1, 1), 0.7), v, *step).mean.sum().backward()
    return float(v.grad) / float(step[1] - step[0])


@settings(max_examples=60, deadline=None)
@given(after=st.floats(0.05, 0.99), level=st.floats(0, 1.4))
def test_at_sigma_one_the_std_is_the_noise_level(after, level):
    """grpo_family 0.1, fact (i): std exactly a, mean (1 - a^2 / 2) x + v dt."""
    x, v = torch.full((1, 4), 0.7), torch.full((1, 4), -0.4)
    found = flow_sde_step(x, v, column(1.0), column(after), column(level), column(after))
    # 1 / (1 - after) and 1 - after cancel up to three float32 roundings.
    assert_close(found.std, column(level), rtol=5e-7, atol=0)
    assert_close(found.mean, (1 - level**2 / 2) * x + v * (after - 1), rtol=1e-5, atol=1e-6)


def test_the_bound_acts_at_sigma_one_only():
    x = torch.ones(2, 3)
    sigma, after, level = column(1.0, 0.9), column(0.8, 0.7), column(0.7, 0.7)
    tight = flow_sde_step(x, x, sigma, after, level, column(0.8, 0.8))
    wide = flow_sde_step(x, x, sigma, after, level, column(0.99, 0.99))
    assert tight.std[0] < wide.std[0]
    assert torch.equal(tight.std[1], wide.std[1])
    assert torch.equal(tight.mean[1], wide.mean[1])


def test_flow_sde_refuses_to_start_at_sigma_one_without_a_bound():
    x = torch.ones(1, 3)
    with pytest.raises(ValueError, match="sigma_ceiling"):
        flow_sde_step(x, x, column(1.0), column(0.8), column(0.7), column(1.0))


def test_flow_sde_refuses_a_vp_model():
    x, step = torch.ones(1, 3), make_step(VP, 0.8, 0.6, 0.7)
    with pytest.raises(ValueError, match="'flow_sde' needs a flow model"):
        flow_sde.build(flow_sde.Config()).transition(VP, VP.predict(x, x, step.sigma, "eps"), x, step)


def test_flow_sde_refuses_a_negative_noise_level():
    with pytest.raises(ValueError, match=r"noise_level=-0\.1"):
        flow_sde.Config(noise_level=-0.1)


# ---- DDIM


def ddim_on_sd15(eta: float, x: torch.Tensor, eps: torch.Tensor) -> tuple[StepDistribution, Step]:
    step = all_steps(vp_schedule(50), VP, eta)
    return ddim.build(ddim.Config(eta=eta)).transition(VP, VP.predict(eps, x, step.sigma, "eps"), x, step), step


def noise_pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind(0)


def test_ddim_std_at_eta_one_is_the_published_one():
    """ddpo sheet 1.2 and 1.8.1: SD1.x, 50 steps; the sheet prints four decimals."""
    found, step = ddim_on_sd15(1.0, *noise_pair(50, 3))
    published = {981: 0.4545, 481: 0.2877, 181: 0.1771, 41: 0.0999, 21: 0.0395, 1: 0.0206}
    table = dict(zip(step.timestep.int().tolist(), found.std.tolist(), strict=True))
    assert {t: table[t] for t in published} == pytest.approx(published, abs=1e-4)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_the_step_of_diffusers_on_the_whole_grid(eta):
    """ddpo sheet 1.8.1: eta 0 is deterministic DDIM."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(
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
    """ddpo sheet 1.8.1: q(x' | x, x0_hat) from Bayes' rule on the chain x' -> x."""
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


def test_ddim_means_agree_for_eps_and_v_networks():
    """ddpo sheet 1.8.3."""
    x, eps = noise_pair(50, 3)
    step = all_steps(vp_schedule(50), VP, 1.0)
    told = VP.predict(eps, x, step.sigma, "eps")
    sampler = ddim.build(ddim.Config())
    other = VP.predict(told.velocity, x, step.sigma, "v")
    assert_close(
        sampler.transition(VP, other, x, step).mean, sampler.transition(VP, told, x, step).mean, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("eta", [-0.1, 1.1])
def test_ddim_refuses_an_eta_outside_its_range(eta):
    with pytest.raises(ValueError, match=f"eta={eta}"):
        ddim.Config(eta=eta)


# ---- the Gaussian


def gaussian(seed: int = 0, shape: tuple[int, ...] = (3, 2, 4, 4)) -> tuple[StepDistribution, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean, x = torch.randn(2, *shape, generator=generator).unbind(0)
    return StepDistribution(mean=mean, std=torch.rand(shape[0], generator=generator) + 0.2), x


def reference(d: StepDistribution) -> Normal:
    return Normal(d.mean, d.std.reshape(-1, *[1] * (d.mean.ndim - 1)).expand_as(d.mean))


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 4, 4), (3, 2, 3, 4, 4)])
def test_log_prob_forms_are_those_of_the_true_gaussian(shape):
    """grpo_family 0.1, 3, 7.6 and 8.1."""
    d, x = gaussian(shape=shape)
    density = reference(d).log_prob(x)
    total = Independent(reference(d), len(shape) - 1).log_prob(x)
    assert_close(d.log_prob(x, "sum"), total)
    assert_close(d.log_prob(x, "mean"), total / d.mean[0].numel())
    assert_close(d.log_prob(x), d.log_prob(x, "mean"))
    assert_close(d.log_prob(x, "position"), density.mean(dim=1))
    assert d.log_prob(x, "position").shape == (shape[0], *shape[2:])
    assert_close(d.log_prob(x, "unscaled"), -(x - d.mean).square().flatten(1).mean(1))


def test_an_unknown_log_prob_form_is_refused():
    d, x = gaussian()
    with pytest.raises(ValueError, match="'median'"):
        d.log_prob(x, "median")


def test_log_prob_of_half_precision_latents_is_float32():
    """grpo_family 0.2."""
    d, x = gaussian()
    half = x.bfloat16()
    assert d.log_prob(half).dtype == torch.float32
    assert torch.equal(d.log_prob(half), d.log_prob(half.float()))


def test_tiling_the_latents_leaves_the_mean_form_and_scales_the_sum_form():
    """ddpo sheet 6.4.3."""
    d, x = gaussian()
    tiled = StepDistribution(mean=d.mean.repeat(1, 1, 2, 2), std=d.std)
    assert_close(tiled.log_prob(x.repeat(1, 1, 2, 2), "mean"), d.log_prob(x, "mean"))
    assert_close(tiled.log_prob(x.repeat(1, 1, 2, 2), "sum"), 4 * d.log_prob(x, "sum"))


@pytest.mark.parametrize("form", ["mean", "sum", "unscaled", "position"])
def test_a_step_without_noise_has_no_log_prob_in_any_form(form):
    """DESIGN section 4: std == 0 raises, it never yields NaN; one such row in the batch is enough."""
    d, x = gaussian()
    with pytest.raises(ValueError, match="std 0"):
        StepDistribution(d.mean, d.std * torch.tensor([1.0, 0.0, 1.0])).log_prob(x, form)


@pytest.mark.parametrize("divisor", ["variance", "flow_grpo"])
def test_a_step_without_noise_has_no_kl(divisor):
    d, _ = gaussian()
    still = StepDistribution(d.mean, torch.zeros(3))
    with pytest.raises(ValueError, match="std 0"):
        still.kl(d, divisor=divisor, dt=-torch.ones(3))


def test_kl_by_variance_is_the_gaussian_kl_per_dim():
    """grpo_family 8.4, `true`."""
    d, x = gaussian()
    other = StepDistribution(mean=x, std=d.std)
    assert_close(d.kl(other), kl_divergence(reference(d), reference(other)).flatten(1).mean(1))


def test_kl_of_flow_grpo_lacks_the_factor_one_over_dt_and_none_is_the_plain_square():
    """grpo_family 1.1.6."""
    d, x = gaussian()
    other, dt = StepDistribution(mean=x, std=d.std), -torch.tensor([0.1, 0.2, 0.3])
    assert_close(d.kl(other, divisor="flow_grpo", dt=dt), d.kl(other) * dt.abs())
    assert_close(d.kl(other, divisor="none"), (d.mean - x).square().flatten(1).mean(1))


def test_kl_of_flow_grpo_asks_for_dt():
    d, _ = gaussian()
    with pytest.raises(ValueError, match="needs dt"):
        d.kl(d, divisor="flow_grpo")


def test_kl_is_minus_the_expected_log_ratio():
    """ddpo sheet 6.4.5: Monte Carlo over 200 000 draws of one dim."""
    count = 200_000
    old = StepDistribution(torch.zeros(count, 1), torch.full((count,), 0.5))
    new = StepDistribution(torch.full((count, 1), 0.3), old.std)
    x = old.sample(torch.randn(count, 1, generator=torch.Generator().manual_seed(0)))
    log_ratio = new.log_prob(x, "sum") - old.log_prob(x, "sum")
    # KL = 0.3^2 / (2 * 0.25) = 0.18; the log-ratio's std is sqrt(2 KL) = 0.6: 4 standard errors.
    assert float(new.kl(old)[0]) == pytest.approx(0.18, rel=1e-5)
    assert -float(log_ratio.mean()) == pytest.approx(0.18, abs=4 * 0.6 / math.sqrt(count))
    assert float(log_ratio.exp().mean()) == pytest.approx(1.0, abs=4 * math.sqrt(math.exp(0.36) - 1) / math.sqrt(count))


def test_a_sample_is_the_mean_plus_std_times_the_noise():
    d, noise = gaussian()
    assert_close(d.sample(noise), reference(d).mean + reference(d).stddev * noise)
    assert torch.equal(StepDistribution(d.mean, torch.zeros(3)).sample(noise), d.mean)


@pytest.mark.parametrize("shape", [(3, 2, 4, 1), (1, 2, 4, 4), (2, 4, 4), (3, 2, 4)])
def test_shapes_must_agree_and_are_never_broadcast(shape):
    d, _ = gaussian()
    wrong = torch.zeros(shape)
    with pytest.raises(ValueError, match="shaped like the mean"):
        d.log_prob(wrong)
    with pytest.raises(ValueError, match="shaped like the mean"):
        d.sample(wrong)
    with pytest.raises(ValueError, match="shaped like the mean"):
        d.kl(StepDistribution(wrong, torch.ones(len(wrong))))
