"""Flow-DPPO: what is dropped and what is left."""

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo
from flowrl.algorithms.flow_dppo import Config, build
from flowrl.losses.ratio import masked_ratio_loss
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
