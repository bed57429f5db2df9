"""DanceGRPO: subsets of steps per sample, one loss per reward, best of n."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flowrl.algorithms.dance_grpo import Config, build
from flowrl.core.types import SampleId
from flowrl.samplers import dance_sde
from flowrl.training.metrics import Sums
from tests.toys import ToyAdapter, bitwise, draw_advantages, learner_of, nudge, roll_out, rollout_of

DANCE = dance_sde.build(dance_sde.Config())


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
