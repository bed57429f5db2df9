"""SAGE-GRPO: equalised steps, the moving anchor, the controller."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.sage_grpo import Config, TrustConfig, build, equaliser, gradient_norms
from flowrl.contracts.grids import flow_schedule
from flowrl.diffusion.plan import window
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.samplers import cps, flow_sde, sage
from tests.toys import ToyAdapter, draw_advantages, nudge, roll_out, updated

SAGE = sage.build(sage.Config())
OFF = TrustConfig(coef=0.0)


def trusted(**options) -> Config:
    return Config(clip_range=0.5, equalise=False, trust=TrustConfig(adaptive=False, coef=1.0, **options))


def metrics_of(session) -> dict[str, float]:
    batch = session.batch()
    return {k: float(v) for k, v in session.algorithm.loss(batch, session.networks).metrics.items()}


LAWS = [SAGE, flow_sde.build(flow_sde.Config()), cps.build(cps.Config())]


@pytest.mark.parametrize("sampler", LAWS)
def test_the_weights_equalise_the_gradient_norms_and_are_one_at_the_median(sampler):
    """4 trained steps, so the lower median is one of them."""
    plan = window(flow_schedule(8), sampler.default_noise_level(), (0, 2, 3, 5))
    norms, scale = gradient_norms(plan, sampler, FlowProcess()), equaliser(plan, sampler, FlowProcess())
    trained = scale[list(plan.train)]
    assert_close(trained * norms, norms.median().expand(4), rtol=1e-6, atol=0)
    assert float(trained[norms == norms.median()]) == 1.0
    assert scale[[1, 4, 6, 7]].tolist() == [1.0] * 4


@pytest.mark.parametrize("sampler", LAWS)
def test_on_policy_the_weighted_gradient_by_the_velocity_has_one_norm_at_all_steps(sampler):
    """By autograd through the kernel and the sampler's own form of log p, with the same noise at every step."""
    plan, process = window(flow_schedule(10), sampler.default_noise_level()), FlowProcess()
    step, scale = plan.steps(torch.arange(9), process), equaliser(plan, sampler, process)[:9]
    x, v, z = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0)).expand(3, 9, 64)
    v = v.clone().requires_grad_(True)
    policy = sampler.transition(process, process.predict(v, x, step.sigma, "velocity"), x, step)
    log_prob = policy.log_prob(policy.sample(z).detach(), sampler.log_prob_form)
    (gradient,) = torch.autograd.grad((scale * log_prob).sum(), v)
    norms = gradient.norm(dim=1)
    assert_close(norms, norms[:1].expand(9), rtol=1e-3, atol=0)
    assert float(scale.max() / scale.min()) > 10


def test_the_norms_and_weights_are_the_published_ones():
    """In numpy: T = 20, shift 5, eta 0.5, N from 0.0188 to 2.77, S from 8.15 to
    0.055; here the last step is not trained, so the median is that of 19."""
    t = np.linspace(1, 0, 21)
    sigmas = 5 * t / (1 + 4 * t)
    before, after = sigmas[:-1], sigmas[1:]
    w = 0.25 * (np.log((1 - after) / (1 - np.minimum(before, 0.997))) - (before - after))
    norm = np.abs((after - before) - w * (1 - before) / (2 * before)) / np.sqrt(w)
    assert norm[[0, -1]] == pytest.approx([0.0188, 2.77], rel=3e-3)
    assert np.sort(norm)[9] / norm[[0, -1]] == pytest.approx([8.15, 0.055], rel=5e-3)
    grid = Schedule(torch.from_numpy(sigmas).float(), torch.from_numpy(1000 * before).float())
    plan = window(grid, 0.5)
    assert gradient_norms(plan, SAGE, FlowProcess()).numpy() == pytest.approx(norm[:-1], rel=1e-5)
    expected = np.append(np.sort(norm[:-1])[9] / norm[:-1], 1.0)
    assert equaliser(plan, SAGE, FlowProcess()).numpy() == pytest.approx(expected, rel=1e-5)


def test_the_weight_of_a_step_multiplies_the_clipped_loss_and_not_the_ratio():
    """S_i * max(-A r, -A clamp(r)), off policy, edge by edge, some of them clipped."""
    session = roll_out(ToyAdapter(), algorithm=build(Config(clip_range=0.02, trust=OFF)), sampler=SAGE)
    plain = build(Config(clip_range=0.02, equalise=False, trust=OFF))
    scale = equaliser(session.plan, SAGE, FlowProcess())
    nudge(session.adapter.network, 0.05)
    advantage, clipped = draw_advantages(len(session.edges)), 0
    for e in range(len(session.edges)):
        (batch,) = session.batches(advantage, order=torch.tensor([e]))
        found, alone = (a.loss(batch, session.networks) for a in (session.algorithm, plain))
        assert torch.equal(found.per_step["policy/ratio"], alone.per_step["policy/ratio"])
        assert_close(found.loss, scale[int(batch.step.index)] * alone.loss, rtol=1e-6, atol=0)
        clipped += int(found.metrics["policy/clip_fraction"])
    assert 0 < clipped < len(session.edges)
    assert float(scale.max() / scale.min()) > 2


def test_the_loss_is_the_plain_one_plus_lambda_times_both_terms():
    """L = PPO + lambda (KL_pos + 0.1 KL_vel), each mean((mean - m)^2) / (2 std^2)."""
    session = roll_out(ToyAdapter(), algorithm=build(trusted()))
    nudge(session.adapter.network)
    batch = session.batch()
    found = session.algorithm.loss(batch, session.networks)
    alone = build(Config(clip_range=0.5, equalise=False, trust=OFF)).loss(batch, session.networks)
    with torch.no_grad():
        policy = session.networks.transition(batch)
    kl = ((policy.mean - batch.columns["mean_old"]).square().flatten(1).mean(1) / (2 * policy.std.square())).sum()
    # The anchor is the policy that rolled out: both terms are that KL.
    assert float(kl) > 1e-3
    assert_close((found.loss - alone.loss).detach(), 1.1 * kl, rtol=1e-3, atol=1e-5)
    assert_close(found.metrics["policy/kl_anchor"], kl, rtol=1e-4, atol=0)
    assert_close(found.metrics["policy/kl_old"], kl, rtol=1e-4, atol=0)


def test_right_after_a_renewal_the_anchor_term_is_zero():
    session = roll_out(ToyAdapter(), algorithm=build(trusted()))
    nudge(session.adapter.network)
    assert metrics_of(session)["policy/kl_anchor"] > 0
    session.algorithm.after_update(10, session.weights, {"policy/trust_kl": 0.0})
    assert metrics_of(session)["policy/kl_anchor"] == 0.0
    assert metrics_of(session)["policy/kl_old"] > 0


def test_the_anchor_is_renewed_after_updates_ten_twenty_and_so_on_only():
    """Every 2 here, through the learner."""
    session = roll_out(ToyAdapter(), algorithm=build(trusted(every=2)))
    seen, after = [], session.algorithm.after_update

    def watched(updates, weights, means):
        before = weights.copies["anchor"]
        after(updates, weights, means)
        seen.append((updates, weights.copies["anchor"] is not before, set(means)))

    session.algorithm.after_update = watched
    updated(session, torch.arange(6.0).reshape(1, 2, 3), updates=3, batch_size=30)
    assert seen == [(k, k == 2, {"policy/trust_kl"}) for k in (1, 2, 3)]


def test_on_policy_the_gaussian_term_pulls_nowhere_and_off_policy_it_does():
    session = roll_out(ToyAdapter(), algorithm=build(trusted(anchor="none")))
    assert metrics_of(session)["policy/kl_old"] == pytest.approx(0.0, abs=1e-10)
    zeros = torch.zeros(len(session.edges))
    assert max(float(g.abs().max()) for g in session.gradient(zeros).values()) < 1e-6
    nudge(session.adapter.network)
    assert max(float(g.abs().max()) for g in session.gradient(zeros).values()) > 1e-4


def test_the_sampled_term_is_the_mean_of_minus_the_log_ratio():
    session = roll_out(ToyAdapter(), algorithm=build(trusted(anchor="none", old="sampled")))
    nudge(session.adapter.network)
    batch = session.batch()
    output = session.algorithm.loss(batch, session.networks)
    expected = -output.per_step["policy/ratio"].log().sum()
    assert_close(output.metrics["policy/kl_old"], expected, rtol=1e-3, atol=1e-5)


def test_the_controller_follows_the_target_within_its_bounds_and_survives_a_checkpoint():
    algorithm = build(Config(trust=TrustConfig(coef=1e-7)))
    weights = roll_out(ToyAdapter(), algorithm=algorithm).weights
    for _ in range(3):
        algorithm.after_update(1, weights, {"policy/trust_kl": 1.0})
    assert algorithm.trust_coef == pytest.approx(1e-7 * 1.5**3)
    other = build(Config())
    other.load_state_dict(algorithm.state_dict())
    assert other.trust_coef == algorithm.trust_coef
    for _ in range(20):
        algorithm.after_update(1, weights, {"policy/trust_kl": 1.0})
    assert algorithm.trust_coef == 1e-5
    for _ in range(20):
        algorithm.after_update(1, weights, {"policy/trust_kl": 0.0})
    assert algorithm.trust_coef == 1e-7


def test_only_the_columns_that_the_switches_need_are_kept():
    assert build(Config()).columns == ("mean_old",)
    assert build(Config(trust=TrustConfig(anchor="fixed", old="none"))).columns == ()
    assert build(Config(trust=OFF)).feedback == ()
