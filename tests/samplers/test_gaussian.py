"""`StepDistribution`: sample, log-prob and KL against torch.distributions."""

import math
from typing import Any

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

from flowrl.samplers.base import StepDistribution


def gaussian(seed: int = 0, shape: tuple[int, ...] = (3, 2, 4, 4)) -> tuple[StepDistribution, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean, x = torch.randn(2, *shape, generator=generator).unbind(0)
    return StepDistribution(mean=mean, std=torch.rand(shape[0], generator=generator) + 0.2), x


def reference(d: StepDistribution) -> Normal:
    return Normal(d.mean, d.std.reshape(-1, *[1] * (d.mean.ndim - 1)).expand_as(d.mean))


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 4, 4), (3, 2, 3, 4, 4)])
def test_log_prob_forms_are_those_of_the_true_gaussian(shape):
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
    unknown: Any = "median"
    with pytest.raises(ValueError, match="'median'"):
        d.log_prob(x, unknown)


def test_log_prob_of_half_precision_latents_is_float32():
    d, x = gaussian()
    half = x.bfloat16()
    assert d.log_prob(half).dtype == torch.float32
    assert torch.equal(d.log_prob(half), d.log_prob(half.float()))


def test_tiling_the_latents_leaves_the_mean_form_and_scales_the_sum_form():
    d, x = gaussian()
    tiled = StepDistribution(mean=d.mean.repeat(1, 1, 2, 2), std=d.std)
    assert_close(tiled.log_prob(x.repeat(1, 1, 2, 2), "mean"), d.log_prob(x, "mean"))
    assert_close(tiled.log_prob(x.repeat(1, 1, 2, 2), "sum"), 4 * d.log_prob(x, "sum"))


@pytest.mark.parametrize("form", ["mean", "sum", "unscaled", "position"])
def test_a_step_without_noise_has_no_log_prob_in_any_form(form):
    """Std == 0 raises, it never yields NaN; one such row in the batch is enough."""
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
    d, x = gaussian()
    other = StepDistribution(mean=x, std=d.std)
    assert_close(d.kl(other), kl_divergence(reference(d), reference(other)).flatten(1).mean(1))


def test_kl_of_flow_grpo_lacks_the_factor_one_over_dt_and_none_is_the_plain_square():
    d, x = gaussian()
    other, dt = StepDistribution(mean=x, std=d.std), -torch.tensor([0.1, 0.2, 0.3])
    assert_close(d.kl(other, divisor="flow_grpo", dt=dt), d.kl(other) * dt.abs())
    assert_close(d.kl(other, divisor="none"), (d.mean - x).square().flatten(1).mean(1))


def test_kl_of_flow_grpo_asks_for_dt():
    d, _ = gaussian()
    with pytest.raises(ValueError, match="needs dt"):
        d.kl(d, divisor="flow_grpo")


def test_kl_is_minus_the_expected_log_ratio():
    """Monte Carlo over 200 000 draws of one dim."""
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
