"""The rule `best_of`: unbiased for the best of k draws, by enumeration; its limits, ties, failures and its schedule."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.algorithms._credit import Rule
from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.best_of import BestOfConfig
from tests.credit import rules
from tests.tables import table

NAN = float("nan")
FIVE = [0.1, 0.3, 0.35, 0.5, 0.9]


def credit(rewards: list[float], k: int, **options) -> list[float]:
    """n s of the samples of one prompt, by themselves."""
    return [float(x) for x in found([rewards], k, **options)[0]]


def found(rewards: list[list[float]], k: int, **options) -> torch.Tensor:
    """The credit of several prompts, [P, G] float64."""
    options = {"std": "none", "clip": None} | options
    total = torch.tensor(rewards, dtype=torch.float64)
    return rules.alone("best_of", total, best_of=BestOfConfig(k=k), **options).values.squeeze(2).double()


def by_subsets(rewards: list[float], k: int) -> list[float]:
    """Mean over all subsets of k with the sample of what it adds to the best of the others, times n k / n."""
    n, added = len(rewards), [0.0] * len(rewards)
    for subset in itertools.combinations(range(n), k):
        for i in subset:
            rest = [rewards[j] for j in subset if j != i]
            added[i] += (max(rewards[j] for j in subset) - max(rest)) / math.comb(n, k)
    return [n * x for x in added]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [-0.4125, -0.1625, -0.1, 0.0875, 0.5875]),
        (2, [5 * s for s in (0, 0.02, 0.03, 0.075, 0.235)]),
        (3, [5 * s for s in (0, 0, 0.005, 0.05, 0.29)]),
        (5, [0, 0, 0, 0, 5 * (0.9 - 0.5)]),
    ],
)
def test_the_worked_example(k, expected):
    assert credit(FIVE, k) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=7), st.data())
def test_it_is_what_a_sample_adds_to_the_best_of_its_k_over_all_subsets(values, data):
    """Integers, so that there are ties."""
    k = data.draw(st.integers(2, len(values)))
    rewards = [float(v) for v in values]
    assert credit(rewards, k) == pytest.approx(by_subsets(rewards, k), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_gradient_is_that_of_the_expected_best_of_k(k):
    """Four actions, two of them with one reward; groups of four, all 256 of them."""
    rewards = torch.tensor([0.2, 1.0, 0.2, -0.5], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    draws = torch.tensor(list(itertools.product(range(4), repeat=k)))
    best = (log_p[draws].sum(dim=1).exp() * rewards[draws].amax(dim=1)).sum()
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    groups = torch.tensor(list(itertools.product(range(4), repeat=4)))
    weights = found(rewards[groups].tolist(), k) / 4
    chance = log_p[groups].sum(dim=1).exp().detach()
    (estimate,) = torch.autograd.grad((chance[:, None] * weights * log_p[groups]).sum(), logits)
    assert_close(estimate, expected, rtol=1e-5, atol=1e-7)  # the credit is rounded to float32


def test_with_one_it_is_the_group_rule_of_the_size_of_leave_one_out():
    total = torch.tensor([FIVE, [3.0, 1.0, 2.0, 2.5, 0.0]], dtype=torch.float64)
    for std in ("none", "global"):
        plain = rules.alone("group", total, std=std, clip=None).values
        one = rules.alone("best_of", total, std=std, clip=None, best_of=BestOfConfig(k=1)).values
        assert_close(one, plain * 5 / 4)


def test_of_right_and_wrong_samples_the_right_ones_have_the_known_share():
    """G C(G - h, k - 1) / C(G, k) for h right ones of G."""
    for right, k in itertools.product((1, 2, 5), (2, 4)):
        values = credit([1.0] * right + [0.0] * (8 - right), k)
        # Equal samples may have different credit; its sum over them is what counts.
        assert sum(values[:right]) == pytest.approx(sum(by_subsets([1.0] * right + [0.0] * (8 - right), k)))
        assert values[right:] == [0.0] * (8 - right)
    assert credit([1.0] + [0.0] * 7, 4)[0] == pytest.approx(8 * math.comb(7, 3) / math.comb(8, 4))


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=6), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=30, deadline=None)
def test_a_constant_changes_nothing_a_scale_all_and_none_is_below_0(values, scale, shift):
    before, after = credit(values, 3), credit([scale * v + shift for v in values], 3)
    assert after == pytest.approx([scale * x for x in before], rel=1e-4, abs=1e-5)
    assert min(before) >= 0


def test_failed_samples_count_for_nothing_and_few_valid_ones_have_the_best_of_all():
    assert credit([NAN, 0.3, 0.1, NAN, 0.9, 0.5, 0.35], 3) == pytest.approx(
        [0, *[5 * s for s in (0, 0)], 0, *[5 * s for s in (0.29, 0.05, 0.005)]], abs=1e-6
    )
    assert credit([0.1, NAN, 0.7, NAN], 3) == pytest.approx([0.0, 0.0, 2 * 0.6, 0.0])
    assert credit([0.1, NAN, NAN, NAN], 2) == [0.0] * 4


def test_large_groups_are_exact():
    """C(64, 32) has 61 bits."""
    values = credit([float(j) for j in range(64)], 32)
    assert values[-1] == pytest.approx(64 * sum(math.comb(j, 30) * (63 - j) for j in range(63)) / math.comb(64, 32))
    assert values[:31] == [0.0] * 31


def test_k_moves_to_its_end_and_a_resumed_run_goes_on_from_there():
    rewards, weights = torch.tensor([[FIVE]], dtype=torch.float64), torch.ones(1)
    config = AdvantageConfig(name="best_of", std="none", best_of=BestOfConfig(k=3, end=1, iterations=2))
    rule, values = Rule(config), []
    for _ in range(2):
        values.append(rule(rewards, weights).values.flatten().tolist())
    other = Rule(config)
    assert other.load_state_dict(json.loads(json.dumps(rule.state_dict() | {"own": 3}))) == {"own": 3}
    values += [one(rewards, weights).values.flatten().tolist() for one in (other, other)]
    assert values == [pytest.approx(credit(FIVE, k), abs=1e-6) for k in (3, 2, 1, 1)]
    assert Rule(AdvantageConfig()).state_dict() == {}


@pytest.mark.parametrize(("options", "group", "words"), table(__file__, "refused_best_of"))
def test_what_the_rule_cannot_do_is_refused(options, group, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        validate(AdvantageConfig, options, "advantages").check_group(group)
