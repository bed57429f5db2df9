"""The value network of methods with a critic."""

import pytest
import torch

from flowrl.credit.critic import Critic


def test_it_learns_the_mean_of_the_rewards_at_a_place_not_their_median():
    critic, rewards = Critic(2, 0, 1e-2), torch.tensor([0.0, 0.0, 0.0, 4.0])
    features = torch.ones(4, 2)
    for _ in range(200):
        critic.descend(critic(features) - rewards)
    assert critic(features).tolist() == pytest.approx([1.0] * 4, abs=0.05)
