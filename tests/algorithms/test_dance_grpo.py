"""DanceGRPO: subsets of steps per sample, one loss per reward, best of n."""

import dataclasses

import pytest
import torch

from flowrl.algorithms.dance_grpo import Config, build
from flowrl.core.types import SampleId
from flowrl.samplers import dance_sde
from tests.toys import ToyAdapter, bitwise, draw_advantages, nudge, roll_out, updated

DANCE = dance_sde.build(dance_sde.Config())


def test_two_rewards_with_weights_one_and_zero_train_the_weights_of_one_bitwise():
    """Through two optimizer steps; a second weight that counts does not."""
    rewards, trained = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(0)), []
    for part, weights in ((rewards[:1], [1.0]), (rewards, [1.0, 0.0]), (rewards, [1.0, 0.5])):
        session = roll_out(ToyAdapter(), algorithm=build(Config(clip_range=0.02)), sampler=DANCE)
        updated(session, part, weights)
        trained.append([p.detach().clone() for p in session.adapter.network.parameters()])
    assert bitwise(trained[1], trained[0])
    assert not bitwise(trained[2], trained[0])


def test_the_loss_is_the_sum_of_one_clipped_loss_per_reward():
    """Where a clip is active it is not the loss of the summed advantages."""
    session = roll_out(ToyAdapter(), algorithm=build(Config(clip_range=0.02)), sampler=DANCE)
    nudge(session.adapter.network, 0.1)
    first, second = draw_advantages(len(session.edges)), draw_advantages(len(session.edges)).flip(0)

    def total(advantage: torch.Tensor) -> float:
        return float(session.algorithm.loss(session.batch(advantage), session.networks).loss)

    both = dataclasses.replace(session.batch(first), advantage=torch.stack([first, second], dim=1))
    found = float(session.algorithm.loss(both, session.networks).loss)
    assert found == pytest.approx(total(first) + total(second), rel=1e-5)
    assert found != pytest.approx(total(first + second), rel=1e-3)


def test_an_update_trains_its_share_of_every_samples_steps():
    """int(K * fraction) steps per sample, drawn per sample and iteration."""
    session = roll_out(ToyAdapter(), algorithm=build(Config()), sampler=DANCE)
    assert updated(session, torch.arange(6.0).reshape(1, 2, 3)).means()["nfe/train"] == 3  # int(5 * 0.6)
    ids = [SampleId(slot, 0) for slot in range(40)]
    masks = [session.algorithm.kept_edges(ids, session.plan, k, 0).reshape(40, 5) for k in (1, 2)]
    assert masks[0].sum(dim=1).tolist() == [3] * 40
    assert len(masks[0].unique(dim=0)) > 5
    assert not torch.equal(masks[0], masks[1])
