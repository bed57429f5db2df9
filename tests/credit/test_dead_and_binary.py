"""Rules for binary rewards: a virtual best sample, smoothed credit, memory that fades, MC-GRPO's factor, RLOO."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.algorithms._credit import Rule
from flowrl.config.components import component
from flowrl.contracts.methods import MethodTrial
from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.credit.history import HistoryConfig
from flowrl.credit.selection import SelectConfig
from flowrl.credit.step_values import by_gains
from flowrl.reward import Card, Reward
from flowrl.run.assembly.rewards import Scorers
from flowrl.scoring.options import Gate
from flowrl.scoring.weighted import WeightedReward
from tests.credit import rules
from tests.remedies.following import stand_in

NAN = float("nan")
ONE = torch.ones(1)
CAT, DOG = ("a cat", ()), ("a dog", ())
TOP = [torch.tensor(1.0)]
ngrpo = AdvantageConfig(std="group", virtual_best=1, ddof=1, eps=1e-6)


def virtual(rows: list[list[float]], config: AdvantageConfig = ngrpo) -> torch.Tensor:
    """Credit [P, G] of groups of a reward that ends at 1."""
    return advantages(torch.tensor([rows]), ONE, config, known=TOP).values.squeeze(2)


# ---- a virtual best sample


@pytest.mark.parametrize(("size", "each"), [(16, -0.2425), (4, -0.4472), (2, -(3**-0.5))])
def test_a_group_that_is_all_wrong_is_pushed_away_from(size, each):
    """-1 / sqrt(G + 1) each."""
    found = advantages(torch.zeros(1, 1, size), ONE, ngrpo, known=TOP)
    assert found.values.flatten().tolist() == pytest.approx([each] * size, abs=1e-4)
    assert each == pytest.approx(-1 / math.sqrt(size + 1), abs=1e-4)
    assert not found.dead.any()
    assert found.kept.all()


def test_one_right_of_sixteen_and_all_right():
    found = advantages(torch.tensor([[[1.0] + [0.0] * 15, [1.0] * 16]]), ONE, ngrpo, known=TOP)
    assert found.values[0].flatten().tolist() == pytest.approx([2.657] + [-0.354] * 15, abs=1e-3)
    assert found.values[1].abs().max() == 0
    assert found.dead.tolist() == [False, True]
    assert not found.kept[1].any()


@pytest.mark.parametrize("name", ["group", "per_reward"])
@pytest.mark.parametrize("std", ["global", "group", "none"])
def test_it_is_the_rule_on_groups_with_samples_more_that_get_nothing_themselves(name, std):
    rewards = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    tops, weights = [torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 0.5])
    config, plain = (AdvantageConfig(name=name, std=std, virtual_best=count) for count in (2, 0))
    longer = torch.cat([rewards, torch.stack(tops)[:, None, None].expand(-1, 3, 2)], dim=2)
    found, whole = advantages(rewards, weights, config, known=tops), advantages(longer, weights, plain)
    assert torch.equal(found.values, whole.values[:, :4])
    assert found.values.shape == (3, 4, 1)
    assert found.valid.shape == found.kept.shape == (3, 4)
    assert bool((found.values.sum(dim=1) < 0).all()), "what is below the best is worse than expected"


def test_masked_samples_and_failed_groups_gain_nothing_from_it():
    found = advantages(torch.tensor([[[0.0, NAN, 0.0], [NAN, NAN, NAN]]]), ONE, ngrpo, known=TOP)
    assert found.values[0].flatten().tolist() == pytest.approx([-1 / math.sqrt(3), 0.0, -1 / math.sqrt(3)], abs=1e-5)
    assert found.values[1].abs().max() == 0
    assert found.dead.tolist() == [False, True]
    assert found.kept.tolist() == [[True, False, True], [False] * 3]


def test_without_it_known_bounds_change_nothing_and_a_selection_takes_real_samples():
    rewards = torch.rand(1, 3, 4, generator=torch.Generator().manual_seed(0))
    plain = AdvantageConfig(std="group")
    assert Rule(plain).history is None
    rule = Rule(AdvantageConfig(std="group", virtual_best=1, select=SelectConfig(keep=2)))
    rule.best = TOP
    found = rule(rewards, ONE)
    assert found.kept.sum(dim=1).tolist() == [2, 2, 2]
    assert_close(found.values.squeeze(2), virtual(rewards[0].tolist(), AdvantageConfig(std="group", virtual_best=1)))


def test_gains_of_steps_are_compared_without_it():
    """They have no highest value."""
    credit = advantages(torch.zeros(1, 1, 2), ONE, ngrpo, known=TOP)
    gains = torch.tensor([[[0.0], [2.0]]])
    plain = AdvantageConfig(std="group", ddof=1, eps=1e-6)
    one, two = (by_gains(credit, gains, rule, 1.0).steps for rule in (ngrpo, plain))
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)


def entry(low: float = -math.inf, high: float = math.inf, **options) -> WeightedReward:
    score: Any = None
    return WeightedReward(
        "mine", Reward(score, Card(outputs=("a", "b"), low=low, high=high, less_is_better=("b",))), **options
    )


@pytest.mark.parametrize(
    ("reward", "highest"),
    [
        (entry(0.0, 1.0), 1.0),
        (entry(-2.0, 1.0, outputs={"b": 1.0}), 2.0),
        (entry(-2.0, 1.0, outputs={"a": 0.5, "b": 0.25}, scale=2.0, offset=1.0), 0.5 * 3 + 0.25 * 5),
        (entry(), math.inf),
        (entry(0.0, outputs={"b": 1.0}), 0.0),
        (entry(clip=(-1.0, 0.5)), 0.5),
        (entry(0.0, 1.0, gate=Gate(output="b", at_least=0.5)), 1.0),
        (entry(-3.0, -1.0, gate=Gate(output="b", at_least=0.5, floor=-0.5)), -0.5),
    ],
)
def test_the_highest_value_of_a_reward_follows_from_its_card_and_its_entry(reward, highest):
    assert reward.highest() == highest


def test_a_reward_without_a_highest_value_is_refused_unless_it_is_only_looked_at():
    bounded, looked = entry(0.0, 1.0), entry(weight=0.0)
    scorers = Scorers(stand_in(entries=[bounded, looked]), None)
    assert [float(top) for top in scorers.highest()] == [1.0, math.inf]
    with pytest.raises(ConfigError, match=r"virtual_best: the card of reward 'mine' says no highest value"):
        Scorers(stand_in(entries=[bounded, entry()]), None).highest()


@pytest.mark.parametrize("method", ["awm", "diffusion_nft", "dgpo", "crd", "ram", "find"])
def test_a_method_on_finished_samples_refuses_it(method):
    with pytest.raises((ConfigError, ValueError), match=r"virtual_best=1 makes the mean advantage negative"):
        component("algorithms", {"name": method, "advantages": {"virtual_best": 1}}, "algorithm", "")


@pytest.mark.parametrize("options", [{"history": {}}, {"virtual_best": 1, "name": "median"}, {"nonzero_factor": True}])
def test_an_option_of_another_rule_is_refused_with_remedies_that_help(options):
    with pytest.raises(ConfigError) as fault:
        validate(AdvantageConfig, options | {"std": "group"}, "")
    assert len(fault.value.remedies) == 2
    for remedy in fault.value.remedies:
        validate(AdvantageConfig, options | {"std": "group"} | dict(remedy.settings), "")


def test_a_run_knows_the_highest_value_of_its_rewards():
    part = component("algorithms", {"name": "flow_grpo", "advantages": {"virtual_best": 1}}, "algorithm", "")
    trial = MethodTrial(part)
    assert trial.session.method.rule.best == [torch.tensor(1.0)]
    credit = trial.session.method.advantages(torch.zeros(1, 2, 4), ONE)
    assert bool((credit.values < 0).all())
    plain = MethodTrial(component("algorithms", {"name": "flow_grpo"}, "algorithm", ""))
    assert plain.session.method.rule.best is None


# ---- smoothed over the visits of a prompt


def smooth(**options) -> Rule:
    return Rule(AdvantageConfig(**{"name": "smooth", "std": "group", "ddof": 0, "eps": 0.0, "clip": None} | options))


def credit(rule: Rule, prompts: list, *rows: list[float]) -> list[list[float]]:
    return rule(torch.tensor([rows], dtype=torch.float64), ONE, prompts).values.squeeze(2).tolist()


def known(rule: Rule, prompt=CAT) -> list[float]:
    assert rule.history is not None
    return rule.history.known[prompt]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([0.0] * 4, [-0.1936] * 4), ([0.0, 0.0, 0.0, 1.0], [-0.5888] * 3 + [1.1996])]
)
def test_the_worked_example_of_the_fourth_visit(rewards, expected):
    """Three visits of mean .5 and std .5 before."""
    rule = smooth(ddof=1)
    rule.load_state_dict({"history": [["a cat", [], [3.0, 0.5, 0.25]]]})
    assert credit(rule, [CAT], rewards)[0] == pytest.approx(expected, abs=1e-4)
    if not any(rewards):
        assert known(rule) == pytest.approx([4.0, 0.375, 0.4841**2], abs=1e-4)


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=6), st.sampled_from([0, 1]))
@settings(max_examples=40, deadline=None)
def test_the_history_is_the_recurrence_of_the_paper_and_the_credit_the_smaller_blend(visits, ddof):
    rule, mean, variance = smooth(ddof=ddof), 0.0, 0.0
    for i, rewards in enumerate(visits, 1):
        own = torch.tensor(rewards, dtype=torch.float64)
        m, s2 = float(own.mean()), float(own.var(correction=ddof))
        variance = ((i - 1) * variance + s2 + (i - 1) / i * (m - mean) ** 2) / i
        mean = ((i - 1) * mean + m) / i
        a = (own - m) / s2**0.5 if s2 else own * 0
        b = (own - mean) / variance**0.5 if variance > 1e-12 else own * 0
        one, other = b / i + (1 - 1 / i) * a, a / i + (1 - 1 / i) * b
        found = rule(own[None, None], ONE, [CAT])
        assert known(rule) == pytest.approx([i, mean, variance], abs=1e-12)
        size = torch.minimum(one.abs(), other.abs()).float()
        assert_close(found.values.flatten().abs(), size, rtol=1e-5, atol=1e-6)
        assert found.dead.tolist() == [len({reward for visit in visits[:i] for reward in visit}) == 1]


def test_at_the_first_visit_it_is_the_rule_group_and_the_order_of_samples_does_not_matter():
    rows = torch.rand(1, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two = smooth(eps=1e-4, ddof=1), smooth(eps=1e-4, ddof=1)
    found = one(rows, ONE, [CAT, DOG]).values
    assert_close(found, rules.alone("group", rows[0], ddof=1, clip=None).values)
    order = torch.tensor([4, 2, 0, 1, 3])
    assert_close(two(rows[:, :, order], ONE, [CAT, DOG]).values, found[:, order])
    again = (rule(rows[:, :, at] ** 2, ONE, [CAT, DOG]).values for rule, at in ((one, slice(None)), (two, order)))
    assert_close(next(again)[:, order], next(again))


def test_equal_rewards_are_dead_until_the_prompt_has_had_others():
    rule = smooth(eps=1e-4)
    for _ in range(3):
        found = rule(torch.full((1, 1, 3), 0.1), ONE, [CAT])
        assert found.dead.tolist() == [True]
        assert found.values.abs().max() == 0
    credit(rule, [CAT], [0.0, 0.1, 0.2])
    found = rule(torch.full((1, 1, 3), 0.0), ONE, [CAT])
    assert found.dead.tolist() == [False]
    assert found.kept.all()
    assert bool((found.values < 0).all())


def test_a_failed_sample_is_left_out_and_a_failed_group_is_no_visit():
    rule, other = smooth(), smooth()
    assert credit(rule, [CAT], [0.0, NAN, 1.0])[0] == pytest.approx([-1.0, 0.0, 1.0])
    credit(other, [CAT], [0.0, 1.0])
    assert known(rule) == known(other)
    assert credit(rule, [CAT, DOG], [NAN] * 3, [NAN] * 3) == [[0.0] * 3] * 2
    assert known(rule) == known(other)
    assert credit(rule, [DOG], [0.0, 1.0])[0] == pytest.approx([-1.0, 1.0])
    assert known(rule, DOG) == known(other)


@pytest.mark.parametrize("options", [{}, {"name": "batch", "std": "global", "history": HistoryConfig(decay=0.9)}])
def test_the_state_comes_back_to_the_last_bit_with_three_numbers_a_prompt(options):
    rule, other = smooth(**options), smooth(**options)
    for rewards in ([0.1, 1 / 3, 0.7], [1e-3, 0.2, 0.2], [0.5, 0.4, 0.3]):
        credit(rule, [CAT], rewards)
    state = json.loads(json.dumps(rule.state_dict()))
    assert other.load_state_dict(state | {"own": 1}) == {"own": 1}
    assert len(known(other)) == 3
    one, two = (credit(each, [CAT, DOG], [0.0, 0.1, 1.0], [1.0, 0.0, 0.0]) for each in (rule, other))
    assert one == two
    assert rule.state_dict() == other.state_dict()


# ---- a memory that fades


def fading(decay: float, **options) -> Rule:
    history = HistoryConfig(decay=decay)
    return Rule(
        AdvantageConfig(**{"name": "batch", "eps": 0.0, "clip": None, "std": "none", "history": history} | options)
    )


def test_without_fading_a_prompt_is_compared_with_the_mean_of_all_its_earlier_rewards():
    """One prompt in a batch of two: what is taken from both is the mean of the batch."""
    rule, earlier = fading(1.0), []
    drawn = torch.rand(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for own in drawn:
        found = rule(own[None, None], ONE, [CAT]).values.flatten()
        expected = own.mean() if not earlier else torch.cat(earlier).mean()
        surprise = own - expected
        assert_close(found, (surprise - surprise.mean()).float())
        earlier.append(own)
        assert known(rule)[:2] == pytest.approx([3.0 * len(earlier), float(torch.cat(earlier).mean())])


def test_it_is_spo_on_binary_rewards_but_for_the_start():
    """alpha and beta of the tracker fade by rho and count successes and failures."""
    rule, alpha, beta = fading(0.9, std="global"), 0.0, 0.0
    draws = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    for number, (one, two) in enumerate(draws.tolist()):
        found = rule(torch.tensor([[[one], [two]]]), ONE, [CAT, DOG]).values.flatten()
        if number:
            p = alpha / (alpha + beta)
            assert known(rule)[2] == pytest.approx(p)
        else:
            assert_close(found, torch.tensor([1.0, -1.0]))
        alpha, beta = 0.9 * alpha + one, 0.9 * beta + 1 - one
        assert known(rule)[1] == pytest.approx(alpha / (alpha + beta))
        assert float(found.double().mean()) == pytest.approx(0.0, abs=1e-6)


def test_a_prompt_that_does_better_than_before_gains_more_than_one_as_good_as_before():
    rule = fading(0.9, std="global", eps=1e-8)
    credit(rule, [CAT, DOG], [0.0, 0.2], [0.8, 1.0])
    (cat, dog) = credit(rule, [CAT, DOG], [0.9, 0.9], [0.9, 0.9])
    assert min(cat) > 0 > max(dog)
    same = fading(0.9, std="global")
    for _ in range(3):
        found = same(torch.full((1, 2, 2), 0.1), ONE, [CAT, DOG])
        assert found.dead.all()
        assert found.values.abs().max() == 0


# ---- the factor of MC-GRPO, and leave one out


def test_the_factor_makes_up_for_samples_without_an_advantage():
    rewards = torch.tensor([[0.1, 0.3, 0.35, 0.5, 0.9], [0.0, 0.0, 0.0, 0.0, 1.0], [0.2] * 5])
    plain, more = (rules.alone("median", rewards, eps=1e-3, nonzero_factor=on) for on in (False, True))
    for row, factor in enumerate((5 / 4, 5.0)):
        bounded = (plain.values[row] * factor).clamp(-5, 5)
        assert_close(more.values[row], bounded)
    assert more.values[2].abs().max() == 0
    assert torch.equal(more.kept, plain.kept)
    assert more.kept.sum(dim=1).tolist() == [4, 4, 0], "G of G + 1"


def test_leave_one_out_is_a_sample_less_the_mean_of_the_others():
    five = torch.tensor([[0.1, 0.3, 0.35, 0.5, 0.9], [0.1, NAN, 0.3, NAN, NAN], [0.1, NAN, NAN, NAN, NAN]])
    found = rules.alone("leave_one_out", five, std="none").values.squeeze(2)
    assert found[0].tolist() == pytest.approx([-0.4125, -0.1625, -0.1, 0.0875, 0.5875])
    assert found[1].tolist() == pytest.approx([-0.2, 0.0, 0.2, 0.0, 0.0])
    assert found[2].tolist() == [0.0] * 5
