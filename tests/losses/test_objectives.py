"""The clipped surrogate and its gradient, for both signs of the advantage."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.losses.ratio import clamped_ratio_loss, clipped_ratio_loss

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
