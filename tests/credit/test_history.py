"""DDPO's statistics: a prompt is compared with its own newest rewards, or with the batch while there are too few."""

import json
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.algorithms._credit import Rule
from flowrl.algorithms.dance_grpo import SeparateConfig
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.credit.history import HistoryConfig, RewardHistory, newest, normalise_against

NAN = float("nan")
ONE = torch.ones(1)
CAT, DOG, OWL = ("a cat", ()), ("a dog", ()), ("an owl", ())


def rule(buffer_size: int = 16, min_count: int = 16, **options) -> Rule:
    history = HistoryConfig(buffer_size=buffer_size, min_count=min_count)
    return Rule(AdvantageConfig(**({"name": "batch", "eps": 1e-6, "clip": None, "history": history} | options)))


def remembered(by: Rule) -> dict:
    """Identity -> its newest rewards."""
    assert by.history is not None
    return by.history.known


def credit(by: Rule, prompts: list, *rows: list[float]) -> np.ndarray:
    """Advantages [P, G] of an iteration."""
    return by(torch.tensor([rows]), ONE, prompts).values.squeeze(2).numpy()


class Official:
    """The statistics written by hand, on flat lists of prompts and rewards."""

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.size, self.least, self.past = buffer_size, min_count, {}

    def __call__(self, prompts: list, rewards: np.ndarray) -> np.ndarray:
        found = np.empty(len(rewards))
        for prompt in dict.fromkeys(prompts):
            own = np.array([p == prompt for p in prompts])
            memory = self.past.setdefault(prompt, deque(maxlen=self.size))
            memory.extend(rewards[own])
            known = np.array(memory) if len(memory) >= self.least else rewards
            found[own] = (rewards[own] - known.mean()) / (known.std() + 1e-6)
        return found


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), least=st.integers(2, 12), extra=st.integers(0, 10))
def test_advantages_are_those_of_the_official_statistics_over_many_iterations(seed, least, extra):
    """Appended first, few rewards compared with the batch, the oldest forgotten; prompts repeat."""
    rng = np.random.default_rng(seed)
    own, official = rule(least + extra, least), Official(least + extra, least)
    # No two rewards are equal: a history without spread gives no signal here, and one of 1e6 there.
    for rewards in rng.choice(6000, (12, 6, 1), replace=False) / 1000 - 3:
        prompts = [(CAT, DOG, OWL)[k] for k in rng.integers(0, 3, 6)]
        found = credit(own, prompts, *rewards.tolist())
        # The rewards pass through float32 tensors, which the loop above does not.
        assert_close(found[:, 0], official(prompts, rewards[:, 0]).astype(np.float32), rtol=1e-4, atol=1e-4)


def test_before_there_are_enough_a_prompt_is_compared_with_the_batch_and_then_with_itself():
    by = rule(4, 4)
    assert_close(
        credit(by, [CAT, DOG], [0.0, 2.0], [4.0, 6.0])[0], np.array([-1.3416, -0.4472], "f4"), atol=1e-4, rtol=0
    )
    # Now four of each: 0, 2, 2, 4 and 4, 6, 8, 10.
    second = credit(by, [DOG, CAT], [8.0, 10.0], [2.0, 4.0])
    assert_close(second[0], np.array([0.4472, 1.3416], "f4"), atol=1e-4, rtol=0)
    assert_close(second[1], np.array([0.0, 1.4142], "f4"), atol=1e-4, rtol=0)
    # Length 4: the cat's first two are forgotten.
    assert_close(credit(by, [CAT], [5.0, 5.0])[0], np.array([0.8165, 0.8165], "f4"), atol=1e-4, rtol=0)


def test_slots_of_one_prompt_share_its_rewards_in_whatever_order():
    one, two = rule(8, 4), rule(8, 4)
    first = credit(one, [CAT, DOG, CAT], [0.0, 1.0], [9.0, 9.5], [2.0, 3.0])
    both = credit(two, [CAT, DOG], [0.0, 1.0, 2.0, 3.0], [9.0, 9.5, NAN, NAN])
    assert_close(first[[0, 2]].reshape(-1), both[0])
    assert list(remembered(one)[CAT]) == [0.0, 1.0, 2.0, 3.0]


def test_adding_a_constant_to_a_prompts_rewards_changes_nothing_once_its_memory_holds_shifted_ones_only():
    drawn = np.random.default_rng(0).normal(size=(6, 2, 4)).round(2)
    plain, shifted = rule(8, 8), rule(8, 8)
    apart = []
    for k, rewards in enumerate(drawn):
        raised = rewards + np.array([[0.0 if k < 2 else 64.0], [0.0]])
        pair = credit(plain, [CAT, DOG], *rewards.tolist()), credit(shifted, [CAT, DOG], *raised.tolist())
        apart.append(np.abs(pair[0] - pair[1]).max())
    # The buffer holds two iterations: the third meets shifted and other rewards, all from the fourth on shifted ones.
    assert apart[2] > 0.5
    assert max(apart[3:]) < 1e-4  # float32 rewards around 64 are spaced by 8e-6, over a std of about 1


def test_without_a_history_it_is_the_batch_normalised():
    """Tracker off: (R - mean) / (std + 1e-8) over the gathered batch."""
    rewards = torch.randn(1, 5, 2, generator=torch.Generator().manual_seed(0))
    found = advantages(rewards, ONE, AdvantageConfig(name="batch", eps=1e-8, clip=None)).values.squeeze(2)
    flat = rewards[0].double().numpy()
    assert_close(found.numpy(), ((flat - flat.mean()) / (flat.std() + 1e-8)).astype(np.float32), rtol=1e-5, atol=1e-6)
    alone = advantages(rewards[:, :, :1], ONE, AdvantageConfig(name="batch", clip=0.5))
    assert alone.values.shape == (5, 1, 1)
    assert float(alone.values.abs().max()) == 0.5
    assert alone.kept.all()


def test_no_std_only_centres_and_clips_with_a_bound_for_maps():
    by = rule(4, 4, std="none", clip=1.0)
    assert credit(by, [CAT], [0.0, 1.0, 2.0, 5.0]).tolist() == [[-1.0, -1.0, 0.0, 1.0]]
    later = by(torch.tensor([[[0.0, 1.0, 2.0, 5.0]]]), ONE, [CAT], clipped=False)
    assert later.values.flatten().tolist() == [-2.0, -1.0, 0.0, 3.0]
    assert later.bound is not None
    assert later.bound.tolist() == [1.0]
    assert len(remembered(by)[CAT]) == 4, "an iteration is remembered once, clipped or not"


def test_a_masked_sample_is_not_remembered_and_gets_nothing():
    by = rule(4, 2)
    found = by(torch.tensor([[[1.0, NAN, 3.0]]]), ONE, [CAT])
    assert found.values.flatten().tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert found.kept.tolist() == [[True, False, True]]
    assert list(remembered(by)[CAT]) == [1.0, 3.0]


def test_a_prompt_compared_with_equal_rewards_is_dead_and_exactly_zero():
    found = rule(4, 4)(torch.tensor([[[0.1] * 4, [0.0, 1.0, NAN, NAN]]]), ONE, [CAT, DOG])
    assert found.dead.tolist() == [True, False]
    assert found.values[0].flatten().tolist() == [0.0] * 4
    assert found.kept.tolist() == [[False] * 4, [True, True, False, False]]


def test_weights_are_applied_before_anything_is_remembered():
    by = rule(4, 2)
    by(torch.tensor([[[1.0, 2.0]], [[10.0, 30.0]]]), torch.tensor([1.0, 0.1]), [CAT])
    assert list(remembered(by)[CAT]) == pytest.approx([2.0, 5.0])


def test_prompts_are_told_apart_by_their_pictures_and_their_whole_text():
    by = RewardHistory(partial(newest, size=4), 2)
    long = "word " * 200
    prompts = [("a cat", ("a.png",)), CAT, (long + "one", ()), (long + "two", ())]
    by.add(prompts, torch.arange(4.0)[:, None])
    assert list(by.known.values()) == [[0.0], [1.0], [2.0], [3.0]]


def test_the_memory_survives_json_to_the_last_bit():
    by, other = rule(3, 2), rule(3, 2)
    credit(by, [("a cat", ("a.png", "b.png")), DOG], [0.1, 1 / 3], [1e-30, 7.0])
    other.load_state_dict(json.loads(json.dumps(by.state_dict())))
    assert remembered(other) == remembered(by)
    assert other.state_dict() == by.state_dict()
    credit(other, [DOG], [2.0, 3.0])
    assert remembered(other)[DOG] == [7.0, 2.0, 3.0], "no more than before"


def test_a_memory_that_is_not_told_the_prompts_says_so():
    with pytest.raises(ValueError, match="the prompts of 2 groups, and got 0"):
        rule()(torch.zeros(1, 2, 3), ONE)


def test_a_group_of_one_is_a_matter_of_the_rule():
    AdvantageConfig(name="batch").check_group(1)
    for name in ("group", "per_reward", "separate", "median"):
        with pytest.raises(ValueError, match=rf"advantages\.name={name} compares .*group_size=1"):
            SeparateConfig(name=name).check_group(1)


def test_a_batch_of_failures_is_all_dead():
    values, dead = normalise_against(torch.full((2, 2), NAN), None, eps=1e-6)
    assert values.tolist() == [[0.0, 0.0]] * 2
    assert dead.tolist() == [True, True]
