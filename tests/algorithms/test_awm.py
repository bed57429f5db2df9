"""AWM: ratio, gradient, stabilisers, and what the rule of its advantages is."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import awm, rwr
from flowrl.algorithms._matching import AnchorConfig
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.losses.matching import elbo_weight, matching_log_prob, mean_square
from tests.toys import CLEAN, EPS, TARGET, V, loss_and_gradient

M, OFF = 6, AnchorConfig(coef=0.0)
SIGMA = torch.tensor([0.9, 0.5, 0.2, 0.9, 0.5, 0.2])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])
ADVANTAGE = torch.tensor([0.8, 0.8, 0.8, -0.3, -0.3, -0.3])


def found(config: awm.Config, *, old: Tensor | None = None, **options: Tensor):
    """(loss, metrics, gradient on v) with the average and the reference nearby."""
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": ADVANTAGE, "sample": SAMPLE} | options
    roles = {"reference": V + 0.1, "anchor": V - 0.2}
    output, gradient = loss_and_gradient(awm.build(config), V, roles, **scene, old=old)
    return float(output.loss), {k: float(x) for k, x in output.metrics.items()}, gradient


def plain(**options) -> awm.Config:
    return awm.Config(kl=OFF, ema_kl=OFF, **options)


@pytest.mark.parametrize("ratio", ["term", "sample"])
@pytest.mark.parametrize("weighting", ["uniform", "sigma", "sigma2", "huber", "ghuber"])
def test_on_policy_the_ratio_is_1_and_the_gradient_that_of_the_weighted_error(ratio, weighting):
    """Whether times are averaged before or after the exponential."""
    loss, metrics, gradient = found(plain(ratio=ratio, weighting=weighting))
    assert loss == pytest.approx(-float(ADVANTAGE.sum()))
    assert metrics["policy/ratio_mean"] == M
    assert metrics["policy/clip_fraction"] == 0
    v = V.clone().requires_grad_(True)
    error = matching_log_prob(mean_square(v, TARGET), SIGMA, weighting)
    (expected,) = torch.autograd.grad(-(ADVANTAGE * error).sum(), v)
    assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_off_policy_the_two_ratios_differ_and_the_clip_acts_in_their_own_units():
    now = matching_log_prob(mean_square(V, TARGET), SIGMA, "ghuber")
    shift = torch.tensor([0.02, -0.01, 0.05, 0.01, 0.03, -0.02], dtype=torch.float64)  # log ratios
    _, term, _ = found(plain(), old=now - shift)
    _, sample, _ = found(plain(ratio="sample"), old=now - shift)
    assert term["policy/ratio_mean"] == pytest.approx(float(shift.exp().sum()))
    assert sample["policy/ratio_mean"] == pytest.approx(3 * float(shift.reshape(2, 3).mean(dim=1).exp().sum()))
    _, clipped, gradient = found(plain(clip_range=0.015), old=now - shift)
    gone = ((ADVANTAGE > 0) & (shift.exp() > 1.015)) | ((ADVANTAGE < 0) & (shift.exp() < 0.985))
    assert clipped["policy/clip_fraction"] == float(gone.sum()) == 3
    assert torch.equal(gradient.abs().amax(dim=1) == 0, gone)


def test_equal_advantages_at_the_reference_are_supervised_training_times_the_advantage():
    """The pulls have no gradient where all networks agree."""
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": torch.full((M,), 0.7)}
    method = awm.build(awm.Config(weighting="uniform"))
    _, gradient = loss_and_gradient(method, V, {"reference": V, "anchor": V}, **scene)
    assert_close(gradient, 0.7 * 2 * (V - TARGET) / 8, rtol=1e-6, atol=1e-9)


def test_the_pulls_are_added_with_their_coefficients_and_weights():
    """The reference is 0.1 away, the average 0.2."""
    base = found(plain())[0]
    both = found(awm.Config(kl=AnchorConfig(coef=2.0), ema_kl=AnchorConfig(coef=3.0)))[0]
    assert both - base == pytest.approx(M * (2 * 0.01 + 3 * 0.04), rel=1e-6)
    elbo = found(awm.Config(kl=AnchorConfig(coef=2.0, weight="elbo"), ema_kl=OFF))[0]
    assert elbo - base == pytest.approx(2 * 0.01 * float(elbo_weight(SIGMA).sum()), rel=1e-5)


def test_advantages_are_rescaled_to_their_bound_not_clipped_at_it():
    """Clip to 5, over 5, times advantage_max."""
    rewards = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    own = awm.build(awm.Config(advantage_max=2.0)).advantages(rewards, torch.ones(1))
    plain_rule = advantages(rewards, torch.ones(1), AdvantageConfig())
    assert_close(own.values, plain_rule.values * 0.4)
    spike = torch.zeros(1, 1, 64)
    spike[0, 0, 0] = 1.0
    assert float(awm.build(awm.Config()).advantages(spike, torch.ones(1)).values.max()) == 1.0


def test_awm_with_advantages_that_are_not_negative_is_weighted_imitation():
    """Uniform weighting, the weights of RWR as advantages."""
    weight = torch.tensor([0.0, 2.0, 0.5, 1.0, 0.0, 3.0])
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": weight}
    _, imitated = loss_and_gradient(rwr.build(rwr.Config()), V, {}, **scene)
    assert_close(found(plain(weighting="uniform"), advantage=weight)[2], imitated, rtol=1e-9, atol=1e-12)
