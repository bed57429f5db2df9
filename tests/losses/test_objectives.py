"""The clipped surrogate and its gradient, for both signs of the advantage."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.losses.ratio import (
    Bounds,
    Surrogate,
    SurrogateName,
    clamped_ratio_loss,
    clipped_ratio_loss,
    surrogate_loss,
)

CLIP = (0.1, 0.2)


def loss_and_gradient(log_ratio: float, advantage: float) -> tuple[float, float, bool]:
    x = torch.tensor([log_ratio], requires_grad=True)
    loss, clipped = clipped_ratio_loss(x, torch.tensor([advantage]), CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return float(loss.detach()), float(gradient), bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "bound"),
    [
        *(pytest.param(r, a, None, id=f"inside-{r}-{a}") for r in (0.95, 1.0, 1.05, 1.15) for a in (2.0, -2.0, 0.0)),
        pytest.param(1.3, 2.0, 1.2, id="a good sample made likelier by too much"),
        pytest.param(0.8, -2.0, 0.9, id="a bad sample made unlikelier by too much"),
        pytest.param(0.5, 2.0, None, id="a good sample made unlikelier"),
        pytest.param(1.6, -2.0, None, id="a bad sample made likelier"),
    ],
)
def test_the_gradient_is_that_of_minus_a_times_the_ratio_and_gone_beyond_the_clip(ratio, advantage, bound):
    """A step in the wrong direction is never clipped."""
    loss, gradient, clipped = loss_and_gradient(float(torch.tensor(ratio).log()), advantage)
    assert loss == pytest.approx(-advantage * (bound or ratio), rel=1e-6)
    assert gradient == pytest.approx(0.0 if bound else -advantage * ratio, rel=1e-6)
    assert clipped == (bound is not None)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    """-A d log p, for both signs in one batch."""
    log_ratio = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    loss, _ = clipped_ratio_loss(log_ratio, advantages, (1e-4, 1e-4))
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert torch.equal(gradient, -advantages)


@settings(max_examples=200, deadline=None)
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5), low=st.floats(1e-4, 0.9), high=st.floats(1e-4, 2))
def test_the_loss_is_the_larger_of_the_two_and_never_below_the_unclipped_one(log_ratio, advantage, low, high):
    """arXiv 1707.06347, eq. 7, written out in Python floats."""
    at, a = torch.tensor([log_ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss, _ = clipped_ratio_loss(at, a, (low, high))
    ratio = 2.718281828459045**log_ratio
    bounded = min(max(ratio, 1 - low), 1 + high)
    assert float(loss) == pytest.approx(max(-advantage * ratio, -advantage * bounded), rel=1e-9, abs=1e-12)


def test_losses_keep_the_shape_of_per_position_ratios():
    log_ratio, advantages = torch.zeros(2, 3, 3), torch.ones(2, 3, 3)
    loss, clipped = clipped_ratio_loss(log_ratio, advantages, CLIP)
    assert loss.shape == clipped.shape == (2, 3, 3)
    assert_close(loss, -advantages)


@pytest.mark.parametrize("shape", [(2, 1), (1,), ()])
def test_shapes_that_would_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match="must agree"):
        clipped_ratio_loss(torch.zeros(2), torch.zeros(shape), CLIP)


def test_a_clamped_ratio_has_a_bound_of_its_own_on_either_side():
    log_ratio = torch.tensor([0.5, 1.0, 2.0]).log()
    loss, clamped = clamped_ratio_loss(log_ratio, torch.tensor([1.0, 1.0, -1.0]), (0.2, 0.4))
    assert_close(loss, torch.tensor([-0.8, -1.0, 1.4]))
    assert clamped.tolist() == [True, False, True]


# ---- surrogates

C = 1e-3
SURROGATES: tuple[SurrogateName, ...] = ("clip", "none", "preserve", "quadratic")


def slopes(log_ratio: torch.Tensor, advantages: torch.Tensor, **options: Any) -> torch.Tensor:
    """g of -A g, the gradient by the log ratio, where A is not 0."""
    x = log_ratio.clone().requires_grad_()
    known: dict[str, Any] = {"bounds": (C, C)} | options
    loss, _ = surrogate_loss(x, advantages, Surrogate(**known))
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return -gradient / advantages


def draws(count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    log_ratio, advantages = torch.randn(2, count, generator=generator, dtype=torch.float64)
    return 2 * C * log_ratio, advantages


def test_at_ratio_one_all_surrogates_have_the_policy_gradient():
    advantages = draws()[1]
    for name in SURROGATES:
        assert torch.equal(slopes(torch.zeros(400).double(), advantages, name=name), torch.ones(400).double()), name


def test_the_clip_as_a_surrogate_is_the_clipped_loss_to_the_last_bit():
    log_ratio, advantages = draws()
    bounds = (C, 1.4 * C)
    found = surrogate_loss(log_ratio, advantages, Surrogate(bounds=bounds))
    for a, b in zip(found, clipped_ratio_loss(log_ratio, advantages, bounds), strict=True):
        assert torch.equal(a, b)


def test_without_a_clip_the_gradient_is_the_ratio_and_nothing_counts_as_clipped():
    log_ratio, advantages = draws()
    assert_close(slopes(log_ratio, advantages, name="none"), log_ratio.exp())
    assert not surrogate_loss(log_ratio, advantages, Surrogate(name="none", bounds=(C, C)))[1].any()


def test_soft_rules_of_language_models_are_no_clip_at_ratios_within_a_thousandth():
    """SAPO's factor of the gradient over r, 4 s(x)(1 - s(x)) with x = tau (r - 1), at r = 1 + 1e-4."""
    for tau, factor in ((1.0, 1 - 2.5e-9), (1e3, 0.99750), (1e4, 0.78645)):
        s = torch.sigmoid(torch.tensor(tau * 1e-4, dtype=torch.float64))
        assert float(4 * s * (1 - s)) == pytest.approx(factor, rel=1e-5, abs=1e-10)


def test_preserve_without_a_share_is_the_clip_and_with_all_of_it_continuous_at_both_edges():
    log_ratio, advantages = draws()
    clipped = slopes(log_ratio, advantages, name="clip")
    assert int((clipped == 0).sum()) > 50
    assert torch.equal(slopes(log_ratio, advantages, name="preserve", kept=(0.0, 0.0)), clipped)
    for advantage, edge in ((1.0, 1 + C), (-1.0, 1 - C)):
        around = torch.tensor([edge - 1e-9, edge + 1e-9], dtype=torch.float64).log()
        below, above = slopes(around, torch.full((2,), advantage), name="preserve", kept=(1.0, 1.0))
        assert float(below) == pytest.approx(float(above), rel=1e-7)
        assert float(below) == pytest.approx(edge, rel=1e-7)


def test_preserve_keeps_a_constant_share_beyond_each_edge():
    """CE-GPPO: b (1 -+ c), however far the ratio is."""
    log_ratio = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    found = slopes(log_ratio, advantages, name="preserve", bounds=(0.1, 0.2), kept=(0.3, 0.75))
    assert_close(found, torch.tensor([0.75 * 1.2, 0.3 * 0.9, math.exp(-0.5), math.exp(0.5)], dtype=torch.float64))
    rule = Surrogate(name="preserve", bounds=(0.1, 0.2), kept=(0.3, 0.75))
    assert surrogate_loss(log_ratio, advantages, rule)[1].tolist() == [False, True, False, False]


def test_bounds_of_each_edge_hold_in_every_surrogate():
    log_ratio, advantages = draws(4)
    each = Bounds(torch.full((4,), C, dtype=torch.float64), torch.full((4,), 2 * C, dtype=torch.float64))
    for name in SURROGATES:
        found = slopes(log_ratio, advantages, name=name, bounds=each)
        assert_close(found, slopes(log_ratio, advantages, name=name, bounds=(C, 2 * C)))


def test_quadratic_is_least_at_eta_times_the_advantage_and_pulls_back_beyond_it():
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    for share, expected in ((0.5, 0.5), (1.0, 0.0), (2.0, -1.0)):
        found = slopes(share * 3e-3 * advantages, advantages, name="quadratic", eta=3e-3)
        assert_close(found, torch.full((2,), expected, dtype=torch.float64))
    rule = Surrogate(name="quadratic", bounds=(C, C), eta=3e-3)
    assert surrogate_loss(0.6 * 3e-3 * advantages, advantages, rule)[1].tolist() == [True, True]
    assert surrogate_loss(0.4 * 3e-3 * advantages, advantages, rule)[1].tolist() == [False, False]
    assert torch.equal(slopes(advantages, advantages, name="quadratic", eta=1e300), torch.ones(2).double())


def test_quadratic_has_the_clip_range_of_its_side_where_no_eta_is_given():
    log_ratio, ones = torch.tensor([-C, C], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert_close(slopes(log_ratio, ones, name="quadratic", bounds=(C, 2 * C)), ones.new_tensor([2.0, 0.5]))


def test_over_all_pairs_of_a_group_a_regression_is_the_one_to_its_means():
    """REBEL: the sum over pairs of ((l_i - l_j) - eta (r_i - r_j))^2 = 2 G sum ((l_i - l) - eta (r_i - r))^2; and with
    the advantage r - r the gradient of that by l, over -2 / eta, is the surrogate's at l summing to 0."""
    log_ratio, reward = draws(6)
    log_ratio, eta = log_ratio - log_ratio.mean(), 2e-3
    x = log_ratio.clone().requires_grad_()
    apart = (x[:, None] - x[None, :]) - eta * (reward[:, None] - reward[None, :])
    (pairs,) = torch.autograd.grad(apart.square().sum(), x)
    advantages = reward - reward.mean()
    found = -advantages * slopes(log_ratio, advantages, name="quadratic", eta=eta)
    assert_close(found, pairs / (4 * 6 * eta))
