"""Draws of prompts by priority: their chances, statistics, state, and what is refused."""

import json
import math
from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.dance_grpo import SeparateConfig
from flowrl.core.errors import ConfigError
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.data.options import PriorityConfig
from flowrl.data.priority import PrioritySource
from flowrl.data.prompts import Prompt
from tests.remedies import follows
from tests.remedies.following import each_ends

KINDS = ("color", "color", "color", "count", "count", "place")
PROMPTS = [Prompt(f"prompt {k}", {"task": kind, "number": k}) for k, kind in enumerate(KINDS)]
ONE = torch.ones(1)
BY = pytest.mark.parametrize("by", ["spread", "ucb"])


def source(
    by: Literal["spread", "ucb"] = "spread", per_iteration: int = 1, seed: int = 0, prompts=PROMPTS, **options
) -> PrioritySource:
    return PrioritySource(prompts, per_iteration, seed, PriorityConfig(by=by, **options))


def learn(order: PrioritySource, numbers: list[int], total: Tensor) -> None:
    """Rewards [P, G] of the prompts `numbers`, credited without a scale: |A| is the distance from the group's mean."""
    credit = advantages(total[None], ONE, AdvantageConfig(std="none", clip=None))
    order.learn([order.prompts[k] for k in numbers], total, credit)


def known(order: PrioritySource, spreads: list[float]) -> PrioritySource:
    """Tell it groups of four whose std, and mean |A|, are `spreads`, one of each prompt."""
    learn(order, list(range(len(spreads))), torch.tensor([[s, -s, s, -s] for s in spreads], dtype=torch.float64))
    return order


def every(order: PrioritySource) -> np.ndarray:
    return order.chances(np.arange(len(order.prompts)))


# ---- chances


@BY
def test_nothing_known_is_uniform_over_kinds_and_so_is_equal_spread(by):
    """Of prompts each by itself that is uniform over prompts."""
    assert every(source(by)) == pytest.approx(np.full(6, 1 / 6))
    same = [known(source(by, 4, seed=3), [0.3] * 6), source(by, 4, seed=3)]
    uniform = known(source(by, 4, seed=3, floor=1.0), [0.1, 0.9, 0.2, 0.4, 0.0, 0.3])
    assert every(uniform).tolist() == [1 / 6] * 6
    for iteration in range(1, 30):
        assert same[0].draw(iteration) == same[1].draw(iteration) == uniform.draw(iteration)


def test_a_prompt_counts_by_its_spread_above_the_floor():
    spreads = [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
    expected = [0.05 / 6 + 0.95 * s for s in spreads]
    assert every(known(source(), spreads)) == pytest.approx(np.array(expected))


def test_prompts_that_are_not_known_count_as_the_best_known():
    order = source(floor=1e-9)
    learn(order, [0, 1], torch.tensor([[0.1, -0.1], [0.4, -0.4]]))
    assert every(order) == pytest.approx(np.array([0.1, *[0.4] * 5]) / 2.1)
    solved = source(floor=1e-9)
    learn(solved, [0, 1], torch.zeros(2, 4))
    assert every(solved) == pytest.approx(np.array([0, 0, *[0.25] * 4]), abs=1e-8)
    learn(solved, [2, 3, 4, 5], torch.zeros(4, 4))
    assert every(solved) == pytest.approx(np.full(6, 1 / 6))


def test_kinds_share_their_spread():
    order = source(group="task", floor=1e-9)
    learn(order, [0, 4, 5], torch.tensor([[0.1, -0.1], [0.2, -0.2], [0.3, -0.3]]))
    assert every(order) == pytest.approx(np.array([0.1, 0.1, 0.1, 0.2, 0.2, 0.3]) / 1.0)


def test_the_bandit_of_dump_by_hand():
    order = source("ucb", group="task", floor=0.1, temperature=0.5)
    learn(order, [0, 1, 4], torch.tensor([[0.1, -0.1], [0.3, -0.3], [0.6, -0.6]]))
    seen, mean = {"color": 4, "count": 2, "place": 0}, {"color": 0.2, "count": 0.6, "place": 0.0}
    score = {kind: mean[kind] + math.sqrt(2 * math.log(6 + 1) / (n + 1)) for kind, n in seen.items()}
    whole = sum(math.exp(value / 0.5) for value in score.values())
    share = {kind: math.exp(value / 0.5) / whole / KINDS.count(kind) for kind, value in score.items()}
    assert every(order) == pytest.approx(np.array([0.1 / 6 + 0.9 * share[kind] for kind in KINDS]))
    # A kind without a prompt that is left takes no part.
    left = [4, 5]
    whole -= math.exp(score["color"] / 0.5)
    expected = [0.05 + 0.9 * math.exp(score[KINDS[k]] / 0.5) / whole for k in left]
    assert order.chances(np.array(left)) == pytest.approx(np.array(expected))


@BY
def test_counts_are_within_three_std_of_the_chances(by):
    order = known(source(by, temperature=0.3, floor=0.3), [0.5, 0.1, 0.3, 0.0, 0.2, 0.4])  # none is next to 0
    times, chance = 3000, every(order)
    counts = Counter(order.draw(iteration)[0] for iteration in range(1, times + 1))
    std = np.sqrt(times * chance * (1 - chance))
    assert (np.abs([counts[k] for k in range(6)] - times * chance) < 3 * std).all()
    assert chance.max() > 1.5 * chance.min()


# ---- draws


@settings(max_examples=60, deadline=None)
@given(per_iteration=st.integers(1, 15), gone=st.sets(st.integers(0, 5), max_size=5), seed=st.integers(0, 50))
def test_no_prompt_comes_twice_before_all_have_come_and_a_retired_one_never(per_iteration, gone, seed):
    order = known(source("spread", per_iteration, seed), [0.5, 0.1, 0.3, 0.0, 0.2, 0.4])
    order.retire(1, sorted(gone))
    live = 6 - len(gone)
    for iteration in range(2, 12):
        drawn = order.draw(iteration)
        assert len(drawn) == per_iteration
        assert not gone & set(drawn)
        counts = Counter(drawn)
        assert max(counts.values()) - min(counts.get(k, 0) for k in range(6) if k not in gone) <= 1
        assert len(set(drawn[:live])) == min(live, per_iteration)


@BY
def test_a_run_goes_on_from_any_iteration_with_the_same_draws(by):
    """What an iteration tells depends on it alone, so an undisturbed run and a resumed one must agree."""

    def iterate(order: PrioritySource, iteration: int) -> list[int]:
        numbers = order.draw(iteration)
        generator = torch.Generator().manual_seed(iteration)
        total = torch.rand(len(numbers), 4, generator=generator) * torch.tensor(numbers)[:, None]
        learn(order, numbers, total)
        if iteration == 4:
            order.retire(iteration, numbers[:1])
        return numbers

    whole, drawn, states = source(by, 3, group="task"), list[list[int]](), list[str]()
    for iteration in range(1, 10):
        drawn.append(iterate(whole, iteration))
        states.append(json.dumps(whole.state_dict()))
    assert len(set(map(tuple, drawn))) > 5
    for done in range(1, 9):
        resumed = source(by, 3, group="task")
        resumed.load_state_dict(json.loads(states[done - 1]))
        assert [iterate(resumed, iteration) for iteration in range(done + 1, 10)] == drawn[done:]
        assert json.dumps(resumed.state_dict()) == states[-1]


def test_a_state_that_was_given_out_does_not_change_later():
    order = known(source(), [0.1] * 6)
    state = json.loads(json.dumps(order.state_dict()))
    fresh = source()
    fresh.load_state_dict(state)
    known(fresh, [0.7] * 6)
    assert state == json.loads(json.dumps(order.state_dict()))


# ---- statistics


def test_the_newest_groups_within_the_window_count():
    order = source(window=9)  # two groups of four
    for size in (0.1, 0.2, 0.4):
        learn(order, [0], torch.tensor([[size, -size, size, -size]], dtype=torch.float64))
    assert order.newest[0] == pytest.approx([0.2, 0.4])
    assert order.seen[0] == 12
    small = source(window=1)
    for size in (0.1, 0.2):
        learn(small, [0], torch.tensor([[size, -size]], dtype=torch.float64))
    assert small.newest[0] == pytest.approx([0.2])


def test_failures_are_no_samples_and_one_sample_has_no_spread():
    nan = float("nan")
    total = torch.tensor([[0.3, nan, -0.3, nan], [0.5, nan, nan, nan], [nan] * 4], dtype=torch.float64)
    spread, bandit = source(), source("ucb")
    learn(spread, [0, 1, 2], total)
    learn(bandit, [0, 1, 2], total)
    assert spread.seen[:3] == [2, 0, 0]
    assert bandit.seen[:3] == [2, 1, 0]
    assert spread.newest[0] == pytest.approx([0.3])
    assert bandit.newest[0] == pytest.approx([0.3])


def test_the_size_of_advantages_is_that_of_their_sum_over_rewards():
    rewards = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0))
    credit = advantages(rewards, torch.tensor([1.0, -0.5]), SeparateConfig(name="separate", std="group"))
    order = source("ucb")
    order.learn(PROMPTS[:3], rewards.sum(dim=0), credit)
    expected = (credit.values[..., 0] + credit.values[..., 1]).abs().mean(dim=1)
    assert [own[0] for own in order.newest[:3]] == pytest.approx(expected.tolist(), rel=1e-6)


def test_one_prompt_in_two_places_has_one_statistic():
    twice = source(prompts=[Prompt("a"), Prompt("b"), Prompt("a")], floor=1e-9)
    learn(twice, [0, 1], torch.tensor([[0.1, -0.1], [0.2, -0.2]]))
    assert every(twice) == pytest.approx(np.array([0.25, 0.5, 0.25]))


# ---- refusals


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"floor": 1.5}, {"temperature": 0.0}, {"window": 0}])
def test_options_out_of_range_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=rf"{name}={value}\b"):
        PriorityConfig(**options)


@follows("flowrl/data/priority.py:PrioritySource.kind")
def test_a_key_that_prompts_have_is_taken():
    each_ends(
        lambda remedy: source(group=remedy.settings.get("data.priority.group", "tasks")),
        "data/priority.py:PrioritySource.kind",
    )


def test_a_key_that_prompts_lack_is_refused_with_those_that_they_have():
    with pytest.raises(
        ConfigError, match=r"group=tasks: the metadata of the prompt 'prompt 0' are \['task', 'num"
    ) as caught:
        source(group="tasks")
    assert [remedy.settings for remedy in caught.value.remedies] == [
        {"data.priority.group": name} for name in ("prompt", "task", "number")
    ]
    with pytest.raises(ConfigError, match=r"the prompt 'bare' are \[\]"):
        source(group="task", prompts=[*PROMPTS, Prompt("bare")])
