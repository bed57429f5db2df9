"""DanceGRPO: subsets of steps per sample, one loss per reward, best of n."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.dance_grpo import Config, build
from flowrl.contracts.grids import flow_schedule
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.selection import SelectConfig
from flowrl.samplers import dance_sde, flow_sde
from flowrl.training.metrics import Sums
from tests.toys import ToyAdapter, bitwise, draw_advantages, learner_of, nudge, roll_out, rollout_of

DANCE = dance_sde.build(dance_sde.Config())


def test_its_kernel_is_the_flow_sde_kernel_with_eta_for_g():
    """At every noise level at which the Flow-SDE's g is eta."""
    session = roll_out(ToyAdapter(), algorithm=build(Config()), sampler=DANCE)
    x, cond = session.edges.nodes[session.edges.parent], session.cond.index(session.rows[session.edges.sample])
    step = session.plan.steps(session.edges.step, session.adapter.process)
    flow = flow_sde.build(flow_sde.Config())
    bound = torch.where(step.sigma >= 1, step.sigma_ceiling, step.sigma)
    same = dataclasses.replace(step, noise_level=0.3 / (step.sigma / (1 - bound)).sqrt())
    with torch.no_grad():
        belief = session.policy.predict(x, step, cond)
    found = DANCE.transition(session.adapter.process, belief, x, step)
    expected = flow.transition(session.adapter.process, belief, x, same)
    assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-6)
    assert_close(found.std, expected.std, rtol=1e-5, atol=0)


def test_the_image_is_the_x0_hat_of_the_last_step_so_no_noise_reaches_it():
    plan = build(Config()).plan(flow_schedule(6), DANCE, 1, 0)
    assert plan.stochastic == (True,) * 5 + (False,)


def test_members_of_a_group_start_from_one_noise_and_groups_do_not():
    session = roll_out(ToyAdapter(), algorithm=build(Config()), sampler=DANCE, shared_start=True, batch_size=6)
    first = session.edges.nodes[session.edges.parent[session.edges.step == 0]].reshape(2, 3, -1)
    assert torch.equal(first, first[:, :1].expand_as(first))
    assert not torch.equal(first[0, 0], first[1, 0])


def test_best_of_n_keeps_the_best_and_the_worst_with_their_advantages():
    rewards = torch.tensor([[[0.1, 0.9, 0.4, 0.7, 0.2, 0.5]]])
    rule = AdvantageConfig(name="separate", std="group", eps=1e-8, ddof=1)
    selected = dataclasses.replace(rule, select=SelectConfig(name="best_worst", keep=4))
    whole, some = (build(Config(advantages=a)).advantages(rewards, torch.ones(1)) for a in (rule, selected))
    assert some.kept.tolist() == [[True, True, False, True, True, False]]
    assert torch.equal(some.values, whole.values)


def test_two_rewards_with_weights_one_and_zero_train_the_weights_of_one_bitwise():
    """Through two optimizer steps; a second weight that counts does not."""
    rewards, trained = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(0)), []
    for part, weights in ((rewards[:1], [1.0]), (rewards, [1.0, 0.0]), (rewards, [1.0, 0.5])):
        session = roll_out(ToyAdapter(), algorithm=build(Config(clip_range=0.02)), sampler=DANCE)
        credit = session.algorithm.advantages(part, torch.tensor(weights))
        learner_of(session).update(1, rollout_of(session, part), credit, Sums())
        trained.append([p.detach().clone() for p in session.adapter.network.parameters()])
    assert bitwise(trained[1], trained[0])
    assert not bitwise(trained[2], trained[0])


def test_the_loss_is_the_sum_of_one_clipped_loss_per_reward():
    """Where a clip is active it is not the loss of the summed advantages."""
    session = roll_out(ToyAdapter(), algorithm=build(Config(clip_range=0.02)), sampler=DANCE)
    nudge(session.adapter.network, 0.1)
    first, second = draw_advantages(len(session.edges)), draw_advantages(len(session.edges)).flip(0)

    def total(advantage: torch.Tensor) -> float:
        (batch,) = session.batches(advantage, batch_size=30)
        return float(session.algorithm.loss(batch, session.networks).loss)

    (batch,) = session.batches(first, batch_size=30)
    both = dataclasses.replace(batch, advantage=torch.stack([first, second], dim=1))
    found = float(session.algorithm.loss(both, session.networks).loss)
    assert found == pytest.approx(total(first) + total(second), rel=1e-5)
    assert found != pytest.approx(total(first + second), rel=1e-3)


def test_an_update_trains_its_share_of_every_samples_steps():
    """int(K * fraction) steps per sample, drawn per sample and iteration."""
    session = roll_out(ToyAdapter(), algorithm=build(Config()), sampler=DANCE)
    rewards, sums = torch.arange(6.0).reshape(1, 2, 3), Sums()
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner_of(session).update(1, rollout_of(session, rewards), credit, sums)
    assert sums.means()["nfe/train"] == 3  # int(5 * 0.6)
    ids = [SampleId(slot, 0) for slot in range(40)]
    masks = [session.algorithm.kept_edges(ids, session.plan, k, 0).reshape(40, 5) for k in (1, 2)]
    assert masks[0].sum(dim=1).tolist() == [3] * 40
    assert len(masks[0].unique(dim=0)) > 5
    assert not torch.equal(masks[0], masks[1])


def test_a_fraction_that_keeps_no_step_is_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match=r"must be at least 0\.2"):
        Config(timestep_fraction=0.1).check(DANCE, 6)
