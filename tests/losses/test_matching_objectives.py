"""Losses on matching errors: the identities that tie the methods together, in float64.

The outputs v of a network are free tensors here: what holds for the gradient on v holds for the weights behind it.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.diffusion.process import expand
from flowrl.losses.matching import (
    centred,
    elbo_weight,
    group_preference_weight,
    group_sum,
    implicit_reward,
    matching_log_prob,
    mean_distance,
    mean_square,
    negative_aware_loss,
    optimality,
    softmax_weights,
)
from tests.toys import draw, outputs_of

M, DIMS = 6, 8
SIGMA = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.95, 1.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.5, -0.7, 0.0, 3.0, -4.0, 0.2], dtype=torch.float64)


def gradient(loss: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """Of a summed loss at v."""
    v = v.detach().clone().requires_grad_(True)
    (found,) = torch.autograd.grad(loss(v).sum(), v)
    return found


def numeric(loss: Callable[[Tensor], Tensor], v: Tensor, direction: Tensor) -> float:
    """The derivative along `direction` by central differences."""
    step = 1e-6
    return float((loss(v + step * direction).sum() - loss(v - step * direction).sum()) / (2 * step))


def rows(values: Tensor) -> Tensor:
    return values[:, None]


# ---- the errors


def test_errors_of_float64_outputs_keep_their_digits_and_halves_are_widened():
    v = draw(0)
    assert mean_square(v, v + 1e-9).tolist() == pytest.approx([1e-18] * M, rel=1e-6)
    half = torch.full((1, 3), 1.001, dtype=torch.bfloat16)
    assert float(mean_square(half, torch.zeros(1, 3, dtype=torch.bfloat16))) == float(half[0, 0].double() ** 2)
    with pytest.raises(ValueError, match="must agree"):
        mean_square(v, v[:1])


def test_a_self_normaliser_has_a_floor_and_no_gradient():
    v = draw(0).requires_grad_(True)
    assert mean_distance(v, v.detach()).tolist() == [1e-5] * M
    assert not mean_distance(v, v.detach() + 1).requires_grad


# ---- DiffusionNFT


def nft(beta: float, sigma: Tensor, x: Tensor, old: Tensor, clean: Tensor, advantage: Tensor, adaptive: bool = True):
    """A_max times the loss as a function of v."""

    def loss(v: Tensor) -> Tensor:
        found, before = (x - rows(sigma) * out for out in (v, old))
        good = optimality(advantage, 5.0)
        return 5.0 * negative_aware_loss(found, before, clean, good, beta, adaptive=adaptive)

    return loss


def scene() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(clean, x, v*, v_old)."""
    clean, eps = draw(1), draw(2)
    return clean, (1 - rows(SIGMA)) * clean + rows(SIGMA) * eps, eps - clean, draw(3)


def frozen_loss(beta: float, x: Tensor, at: Tensor, old: Tensor, clean: Tensor, good: Tensor) -> Callable:
    """The loss with its self-normalisers held at `at`, which is what its gradient differentiates."""

    def branches(v: Tensor) -> tuple[Tensor, Tensor]:
        now, before = x - rows(SIGMA) * v, x - rows(SIGMA) * old
        return beta * now + (1 - beta) * before, (1 + beta) * before - beta * now

    held = [mean_distance(branch, clean) for branch in branches(at)]

    def loss(v: Tensor) -> Tensor:
        plus, minus = (mean_square(branch, clean) / w for branch, w in zip(branches(v), held, strict=True))
        return (good * plus + (1 - good) * minus) / beta

    return loss


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_nft_away_from_the_old_policy_agrees_with_finite_differences(beta):
    clean, x, _, old = scene()
    at, direction, good = draw(4), draw(5), optimality(ADVANTAGE, 5.0)
    slope = float((gradient(nft(beta, SIGMA, x, old, clean, ADVANTAGE), at) * direction).sum())
    assert slope == pytest.approx(5 * numeric(frozen_loss(beta, x, at, old, clean, good), at, direction), rel=1e-7)


def test_at_the_old_policy_both_branches_are_equal_and_the_value_knows_no_reward():
    clean, x, _, old = scene()
    values = [nft(0.1, SIGMA, x, old, clean, torch.full((M,), a))(old) for a in (-5.0, 0.0, 5.0)]
    assert_close(values[0], values[1], rtol=1e-12, atol=0)
    assert_close(values[2], values[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize(("advantage", "sign"), [(5.0, 1.0), (-5.0, -1.0)])
def test_a_sure_sample_pulls_the_policy_to_the_data_or_to_its_mirror_image(beta, advantage, sign):
    """r = 1 is least at v_old + (v* - v_old) / beta, r = 0 at v_old - (v* - v_old) / beta."""
    clean, x, target, old = scene()
    best = old + sign * (target - old) / beta
    loss = nft(beta, SIGMA, x, old, clean, torch.full((M,), advantage), adaptive=False)
    assert float(loss(best).max()) < 1e-20
    assert float(loss(best + 0.1 * draw(6)).min()) > 1e-6
    assert float(gradient(loss, best).abs().max()) < 1e-9


def test_nft_is_two_and_a_half_times_awm_huber_for_gaussian_residuals():
    """Mean |e| = sqrt(2 / pi) sqrt(l), so the ratio is 2 / sqrt(2 / pi) = 2.507 in many dims."""
    dims = 40_000
    clean, eps, old = draw(1, 1, dims), draw(2, 1, dims), draw(3, 1, dims)
    sigma, target = torch.tensor([0.6], dtype=torch.float64), eps - clean
    x, advantage = (1 - 0.6) * clean + 0.6 * eps, torch.tensor([1.0], dtype=torch.float64)
    own = gradient(nft(1.0, sigma, x, old, clean, advantage), old)
    huber = gradient(lambda v: -matching_log_prob(mean_square(v, target), sigma, "huber"), old)
    assert float(own.norm() / huber.norm()) == pytest.approx(2 * math.sqrt(math.pi / 2), rel=0.02)
    assert float((own * huber).sum()) > 0


# ---- AWM's weightings


WEIGHTS = {
    "uniform": lambda sigma, error: torch.ones_like(error),
    "sigma": lambda sigma, error: sigma,
    "sigma2": lambda sigma, error: sigma.square(),
    "huber": lambda sigma, error: sigma / (2 * (error + 1e-10).sqrt()),
    "ghuber": lambda sigma, error: sigma * (error + 1e-10) ** (0.25 - 1),
}


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_a_weighted_log_prob_has_the_gradient_of_minus_its_weight_times_the_error(weighting):
    v, target = draw(3), draw(4)
    found = gradient(lambda v: matching_log_prob(mean_square(v, target), SIGMA, weighting), v)
    weight = WEIGHTS[weighting](SIGMA, mean_square(v, target))
    assert_close(found, -gradient(lambda v: weight * mean_square(v, target), v), rtol=1e-9, atol=1e-12)
    slope = numeric(lambda v: matching_log_prob(mean_square(v, target), SIGMA, weighting), v, draw(5))
    assert float((found * draw(5)).sum()) == pytest.approx(slope, rel=1e-7)


def test_the_generalised_huber_meets_its_two_special_cases():
    """p = 1 is `sigma`, p = 1/2 twice `huber`."""
    error = draw(0, M).square()
    ghuber = {p: matching_log_prob(error, SIGMA, "ghuber", p) for p in (0.5, 1.0)}
    assert_close(ghuber[1.0], matching_log_prob(error, SIGMA, "sigma"), rtol=1e-12, atol=1e-14)
    assert_close(ghuber[0.5], 2 * matching_log_prob(error, SIGMA, "huber"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weighting", WEIGHTS)
def test_no_error_is_a_log_prob_of_0_with_a_finite_gradient(weighting):
    error = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    found = matching_log_prob(error, SIGMA, weighting)
    assert found.tolist() == [0.0] * M
    (slope,) = torch.autograd.grad(found.sum(), error)
    assert bool(slope.isfinite().all())


def test_the_elbo_weight_is_the_published_one():
    """1 / (2 s^2), s = 0.7 sqrt(sigma / (1 - min(sigma, 0.99))); finite at sigma 1."""
    s = 0.7 * (SIGMA / (1 - SIGMA.clamp(max=0.99))).sqrt()
    assert_close(elbo_weight(SIGMA), 1 / (2 * s.square()))


# ---- DGPO


GROUP = torch.tensor([7, 7, 7, 2, 2, 2])


def group_loss(v: Tensor, target: Tensor, reference: Tensor, advantage: Tensor, beta: float) -> Tensor:
    margin = advantage * (mean_square(v, target) - mean_square(reference, target))
    sums = torch.stack([margin[:3].mean(), margin[3:].mean()])
    return -torch.nn.functional.logsigmoid(-beta * sums)


@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_the_group_weight_gives_the_gradient_of_the_preference_loss(beta):
    """But for beta / G; the weight is detached, or there would be a second term."""
    target, reference, v = draw(1), draw(2), draw(2) + 0.05 * draw(3)

    def surrogate(v: Tensor) -> Tensor:
        error = mean_square(v, target)
        weight = group_preference_weight(ADVANTAGE, error, mean_square(reference, target), GROUP, beta)
        assert not weight.requires_grad
        return weight * ADVANTAGE * error

    found = gradient(surrogate, v)
    whole = gradient(lambda v: group_loss(v, target, reference, ADVANTAGE, beta), v)
    assert_close(found * beta / 3, whole, rtol=1e-9, atol=1e-12)
    direction = draw(5)
    slope = numeric(lambda v: group_loss(v, target, reference, ADVANTAGE, beta), v, direction)
    assert float((found * direction).sum()) * beta / 3 == pytest.approx(slope, rel=1e-5, abs=1e-8)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(M)))
def test_group_sums_do_not_depend_on_the_order_of_the_rows(order):
    values = draw(0, M)
    expected = torch.cat([values[:3].sum().expand(3), values[3:].sum().expand(3)])
    assert_close(group_sum(values[order], GROUP[order]), expected[order], rtol=1e-12, atol=1e-14)


# ---- signed targets


def test_a_signed_target_has_the_gradient_of_the_weighted_error_and_is_never_negative():
    clean, eps, v = draw(1), draw(2), draw(3)
    target = eps - clean

    def loss(v: Tensor) -> Tensor:
        outputs = outputs_of({"policy": v}, clean=clean, eps=eps, sigma=SIGMA)
        return mean_square(v, (v - expand(ADVANTAGE, v) * (v - outputs.target)).detach())

    assert_close(loss(v), ADVANTAGE.square() * mean_square(v, target), rtol=1e-9, atol=1e-12)
    assert_close(gradient(loss, v), gradient(lambda v: ADVANTAGE * mean_square(v, target), v), rtol=1e-9, atol=1e-12)


# ---- CRD


def test_centring_removes_what_is_constant_in_a_prompt_and_keeps_the_gradient():
    values, weight = draw(0, M).requires_grad_(True), torch.full((M,), 1 / 3, dtype=torch.float64)
    shift = torch.tensor([4.0, 4, 4, -9, -9, -9], dtype=torch.float64)
    found = centred(values, GROUP, weight)
    assert_close(centred(values + shift, GROUP, weight), found, rtol=0, atol=1e-12)
    assert_close(found[:3].mean(), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-12)
    (slope,) = torch.autograd.grad(found[0], values)
    assert slope.tolist() == [1.0, 0, 0, 0, 0, 0], "the mean of the prompt has a gradient"


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_implicit_reward_is_0_at_the_old_policy_and_grows_as_the_error_falls(adaptive):
    old, target = draw(1), draw(2)
    assert implicit_reward(old, old, target, adaptive=adaptive).tolist() == [0.0] * M
    assert float(implicit_reward(old + 0.1 * (target - old), old, target, adaptive=adaptive).min()) > 0
    found = gradient(lambda v: implicit_reward(v, old, target, adaptive=adaptive), old)
    weight = mean_distance(old, target) if adaptive else torch.ones(M, dtype=torch.float64)
    assert_close(found, gradient(lambda v: -mean_square(v, target) / weight, old), rtol=1e-9, atol=1e-12)


# ---- RWR


@given(shift=st.floats(-50, 50), temperature=st.floats(0.05, 5))
@settings(max_examples=50, deadline=None)
def test_softmax_weights_ignore_a_constant_and_sum_to_1(shift, temperature):
    """Masked samples have none; a group without any score has none at all."""
    rewards = torch.tensor([[0.1, 0.5, math.nan, 0.3], [math.nan] * 4])
    found = softmax_weights(rewards.double(), temperature)
    assert_close(softmax_weights(rewards.double() + shift, temperature), found, rtol=1e-6, atol=1e-12)
    assert found.sum(dim=1).tolist() == pytest.approx([1.0, 0.0])
    assert float(found[0, 2]) == 0
