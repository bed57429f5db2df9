"""Flow-DPPO: what is dropped and what is left."""

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo
from flowrl.algorithms.flow_dppo import Config, build
from flowrl.losses.ratio import masked_ratio_loss, projected
from flowrl.samplers.base import StepDistribution
from tests.toys import ToyAdapter, nudge, off_policy, roll_out


def test_at_threshold_zero_exactly_the_aligned_terms_are_dropped():
    """r > 1 and A > 0, or r < 1 and A < 0."""
    session = roll_out(ToyAdapter(), algorithm=build(Config(threshold=0.0)))
    nudge(session.adapter.network)
    batch = session.batch()
    output = session.algorithm.loss(batch, session.networks)
    ratio, a = output.per_step["policy/ratio"], batch.advantage[:, 0]
    aligned = ((ratio > 1) & (a > 0)) | ((ratio < 1) & (a < 0))
    assert torch.equal(output.per_step["policy/clip_fraction"].bool(), aligned)
    assert 0 < int(aligned.sum()) < len(batch)
    assert_close(output.loss, -(a * ratio)[~aligned].sum(), rtol=1e-5, atol=1e-6)
    split = output.metrics["policy/clip_fraction_positive"] + output.metrics["policy/clip_fraction_negative"]
    assert float(split) == int(aligned.sum())


@pytest.mark.parametrize("divisor", ["variance", "none"])
def test_between_the_extremes_the_far_and_aligned_terms_are_dropped(divisor):
    """KL = mean((mean - mean_old)^2 / (2 w)) per edge, or the plain square, against the threshold."""
    session = roll_out(ToyAdapter(), algorithm=build(Config(divisor=divisor)))
    nudge(session.adapter.network)
    batch = session.batch()
    with torch.no_grad():
        policy = session.networks.transition(batch)
    kl = (policy.mean - batch.columns["mean_old"]).square().flatten(1).mean(1)
    if divisor == "variance":
        kl = kl / (2 * policy.std.square())
    threshold = float(kl.sort().values[14:16].mean())
    law = torch.distributions.Normal(policy.mean, policy.std[:, None, None, None])
    ratio = (law.log_prob(batch.next_latents).flatten(1).mean(1) - batch.old_log_prob).exp()
    a = batch.advantage[:, 0]
    far, aligned = kl >= threshold, (ratio - 1) * a > 0
    assert all(int(some.sum()) > 0 for some in (far & aligned, far & ~aligned, ~far & aligned))
    output = build(Config(divisor=divisor, threshold=threshold)).loss(batch, session.networks)
    assert torch.equal(output.per_step["policy/clip_fraction"].bool(), far & aligned)
    assert_close(output.loss.detach(), -(a * ratio)[~(far & aligned)].sum(), rtol=1e-5, atol=1e-5)
    assert_close(output.metrics["policy/kl_old"], kl.sum(), rtol=1e-5, atol=0)


def test_at_an_infinite_threshold_it_is_the_unclipped_surrogate():
    """That of a clip range so wide that it never acts."""
    found = off_policy(build(Config(threshold=float("inf"))))
    expected = off_policy(flow_grpo.build(flow_grpo.Config(clip_range=100.0)))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_infinite_ratio_behind_the_mask_leaves_no_nan():
    """No inf * 0."""
    log_ratio = torch.tensor([200.0, 0.1], requires_grad=True)
    loss, dropped = masked_ratio_loss(log_ratio, torch.ones(2), torch.tensor([True, False]))
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert dropped.tolist() == [True, False]
    assert gradient.tolist()[0] == 0.0
    assert bool(gradient.isfinite().all())


# ---- projection


def law(seed: int = 0, size: float = 1.0) -> tuple[StepDistribution, torch.Tensor]:
    """Five steps in 8 dims, float64, whose mean has moved from the old one by about `size` of a std."""
    old, change = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    std = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    mean = (old + size * std[:, None] * change).requires_grad_()
    return StepDistribution(mean, std), old


def kl_of(policy: StepDistribution, old: torch.Tensor) -> torch.Tensor:
    return policy.kl(StepDistribution(old, policy.std))


def test_a_projected_step_lies_on_the_ball_and_others_stay_to_the_last_bit():
    policy, old = law()
    threshold = float(kl_of(policy, old).detach().median())
    drawn, far = projected(policy, old, threshold, "variance")
    assert far.tolist() == (kl_of(policy, old) > threshold).tolist()
    assert 0 < int(far.sum()) < 5
    assert_close(kl_of(drawn, old)[far], torch.full((int(far.sum()),), threshold, dtype=torch.float64))
    assert torch.equal(drawn.mean[~far], policy.mean[~far])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_of_a_projected_step_has_no_part_outwards_whatever_the_advantage(sign):
    policy, old = law()
    drawn, far = projected(policy, old, 1e-3, "variance")
    assert far.all()
    x_next = old + policy.std[:, None] * torch.randn(5, 8, generator=torch.Generator().manual_seed(9)).double()
    loss = -sign * (drawn.log_prob(x_next) - StepDistribution(old, policy.std).log_prob(x_next)).exp()
    (gradient,) = torch.autograd.grad(loss.sum(), policy.mean)
    outwards = ((policy.mean - old) * gradient).sum(dim=1) / (policy.mean - old).norm(dim=1)
    assert float(outwards.abs().max()) < 1e-7  # x' is taken in float32
    assert float(gradient.norm(dim=1).min()) > 1e-3


def test_a_ball_of_no_size_holds_the_old_mean_without_a_gradient():
    policy, old = law()
    drawn, far = projected(policy, old, 0.0, "variance")
    (gradient,) = torch.autograd.grad(drawn.mean.sum(), policy.mean)
    assert far.all()
    assert torch.equal(drawn.mean, old)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    on_policy = StepDistribution(old.clone().requires_grad_(), policy.std)
    drawn, far = projected(on_policy, old, 0.0, "variance")
    (gradient,) = torch.autograd.grad(drawn.mean.sum(), on_policy.mean)
    assert not far.any()
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_projection_in_an_infinite_ball_is_the_unclipped_surrogate():
    found = off_policy(build(Config(threshold=float("inf"), outside="project")))
    expected = off_policy(flow_grpo.build(flow_grpo.Config(surrogate="none")))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_on_policy_projection_has_flow_grpos_gradient():
    found, expected = (
        off_policy(method, size=0.0)
        for method in (build(Config(outside="project")), flow_grpo.build(flow_grpo.Config(clip_range=1e-3)))
    )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_pull_is_the_kl_to_where_a_step_was_drawn_and_projected_steps_are_counted():
    session = roll_out(ToyAdapter(), algorithm=build(Config()))
    nudge(session.adapter.network)
    batch = session.batch()
    outputs = [
        build(Config(threshold=1e-4, outside="project", pull=pull)).loss(batch, session.networks) for pull in (0.0, 3.0)
    ]
    with torch.no_grad():
        policy = session.networks.transition(batch)
        drawn, far = projected(policy, batch.columns["mean_old"], 1e-4, "variance")
        pull = policy.kl(drawn)
    assert 0 < int(far.sum()) <= len(batch)
    assert_close(outputs[1].loss - outputs[0].loss, 3 * pull.sum(), rtol=1e-3, atol=1e-6)
    assert torch.equal(outputs[0].per_step["policy/clip_fraction"].bool(), far)
