"""Credit by the spread of a group: GARDO's distances and DiverseGRPO's shares, with their limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms._credit import Rule
from flowrl.config.checks import check
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.credit.advantages import AdvantageConfig, Advantages
from flowrl.credit.spread import SpreadConfig
from flowrl.credit.step_values import by_gains

WEIGHTS = torch.tensor([1.0, 0.0])


def credit(rewards: Tensor, spread: SpreadConfig | None, **rule: object) -> Advantages:
    options: dict = {"std": "none", "clip": None} | rule
    return Rule(AdvantageConfig(spread=spread, **options))(rewards, WEIGHTS)


def values(rewards: Tensor, spread: SpreadConfig | None, **rule: object) -> Tensor:
    return credit(rewards, spread, **rule).values.squeeze(2)


def table(seed: int, prompts: int = 3, size: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return torch.stack([torch.randn(prompts, size), torch.rand(prompts, size) + 0.1])


DISTANCE, SHARE = SpreadConfig(by="distance", reward=1), SpreadConfig(by="share", reward=1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_distances_weigh_what_is_above_the_mean_alone(seed):
    rewards = table(seed)
    centred = rewards[0].double() - rewards[0].double().mean(1, keepdim=True)
    factor = rewards[1].double() / rewards[1].double().mean(1, keepdim=True)
    assert_close(values(rewards, DISTANCE), torch.where(centred > 0, centred * factor, centred).float())
    # A common factor of the distances, and a constant added to the rewards, change nothing.
    other = torch.stack([rewards[0] + 3, 0.25 * rewards[1]])
    assert_close(values(other, DISTANCE), values(rewards, DISTANCE), atol=1e-5, rtol=1e-4)


def test_equal_distances_are_the_plain_rule_bit_for_bit_and_a_duplicate_is_worth_nothing_above_the_mean():
    rewards = table(0)
    plain = values(rewards, None)
    for level in (0.25, 0.0, math.nan):  # measured, all images equal, not measured
        rewards[1] = level
        assert torch.equal(values(rewards, DISTANCE), plain)
    rewards[0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    rewards[1, 0] = torch.tensor([0.0, 0.5, 0.5, 0.5, 0.0])  # the first and the last are the same image
    found = values(rewards, DISTANCE)[0]
    assert found.tolist() == pytest.approx([-2.0, -1.0, 0.0, 0.5 / 0.3, 0.0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_rewards_above_0_are_shared_before_the_rule(seed):
    rewards = table(seed)
    rewards[1] = 1 / torch.randint(1, 5, rewards[1].shape).float()
    shared = torch.where(rewards[0] > 0, rewards[0] * rewards[1], rewards[0])
    for rule in ({}, {"std": "group"}, {"name": "median"}, {"name": "batch", "std": "global"}):
        rule = {"clip": 5.0} | rule
        wanted = values(torch.stack([shared, rewards[1]]), None, **rule)
        assert torch.equal(values(rewards, SHARE, **rule), wanted)


def test_shares_of_one_are_the_plain_rule_and_what_is_not_measured_stays_whole():
    rewards = table(1)
    plain = values(rewards, None)
    for share in (1.0, math.nan):
        rewards[1] = share
        assert torch.equal(values(rewards, SHARE), plain)
    rewards[0, 0, 2] = math.nan  # a failure stays one
    assert not credit(rewards, SHARE).valid[0, 2]


def test_the_clip_follows_the_distance():
    rewards = torch.tensor([[[0.0, 0.0, 0.0, 4.0]], [[0.1, 0.1, 0.1, 0.7]]])
    assert values(rewards, DISTANCE, clip=2.0)[0].tolist() == pytest.approx([-1, -1, -1, 2])
    rule = Rule(AdvantageConfig(std="none", clip=2.0, spread=DISTANCE))
    found = rule(rewards, WEIGHTS, clipped=False)
    assert found.values[0, :, 0].tolist() == pytest.approx([-1, -1, -1, 3 * 2.8])


def test_gains_of_single_steps_are_compared_as_they_are():
    rewards, gains = table(2), torch.randn(3, 5, 4)
    plain, config = (AdvantageConfig(std="none", clip=None, spread=each) for each in (None, DISTANCE))
    own = credit(rewards, DISTANCE)
    one, other = (by_gains(own, gains, rule, 0.5).steps for rule in (plain, config))
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


def test_a_spread_without_a_reward_that_measures_it_is_refused():
    entry = "{name: diversity, near: 0.9, weight: 0, outputs: {diversity_share: 1.0}}"
    own = "rewards=[{name: jpeg}, %s]"

    def checked(rewards: str, number: int = 1, *more: str) -> None:
        spread = f"algorithm.advantages.spread={{by: share, reward: {number}}}"
        check(resolve(load_config("quickstart", ["algorithm={name: flow_grpo}", rewards, spread, *more])))

    checked(own % entry)
    wrong = (
        entry.replace("_share", "_distance"),
        entry.replace("weight: 0", "weight: 1"),
        "{name: diversity, weight: 0}",
    )
    for each in wrong:
        with pytest.raises(ConfigError, match=r"rewards\.1 must be an entry such as"):
            checked(own % each)
    with pytest.raises(ConfigError, match=r"rewards\.2 must be"):
        checked(own % entry, 2)
    with pytest.raises(ConfigError, match="reward=-1"):
        checked(own % entry, -1)
