"""RWR, RAFT and RAM: weights that are never negative, and regression to a moved reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import raft, ram, rwr
from flowrl.algorithms._matching import AnchorConfig
from tests.toys import CLEAN, EPS, TARGET, Moves, V, draw, loss_and_gradient

M, NAN, ONE = 6, math.nan, torch.ones(1)
SIGMA = torch.linspace(0.1, 1.0, M)
REWARDS = torch.tensor([[[0.1, 0.9, 0.9, 0.2], [0.3, NAN, 0.5, 0.4], [0.7, 0.7, 0.7, 0.7]]])


def found(method, advantage: Tensor, v: Tensor = V, **roles: Tensor):
    return loss_and_gradient(method, v, roles, clean=CLEAN, eps=EPS, sigma=SIGMA, advantage=advantage)


# ---- RWR


def test_equal_rewards_are_plain_training_on_own_samples():
    credit = rwr.build(rwr.Config()).advantages(torch.full((1, 2, 3), 0.4), ONE)
    assert credit.values.flatten().tolist() == [1.0] * 6
    assert credit.kept.all()
    assert not credit.dead.any()
    _, gradient = found(rwr.build(rwr.Config()), torch.ones(M))
    assert_close(gradient, 2 * (V - TARGET) / 8)


def test_softmax_weights_have_mean_1_in_a_prompt_and_ignore_a_constant():
    method = rwr.build(rwr.Config(temperature=0.3))
    credit, shifted = method.advantages(REWARDS, ONE), method.advantages(REWARDS + 7.0, ONE)
    assert_close(credit.values, shifted.values, rtol=1e-4, atol=1e-5)
    assert credit.values[:, :, 0].mean(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert float(credit.values[0, 1] / credit.values[0, 0]) == pytest.approx(math.exp(0.8 / 0.3), rel=1e-5)
    assert float(credit.values[1, 1]) == 0
    assert not credit.kept[1, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weighting": "exp", "temperature": 2.0}, [math.exp(0.6), 0.0, math.exp(1.0), math.exp(0.8)]),
        ({"weighting": "reward"}, [0.3, 0.0, 0.5, 0.4]),
        ({"weighting": "threshold", "threshold": 0.4}, [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_other_weights_are_what_they_say(options, expected):
    credit = rwr.build(rwr.Config(**options)).advantages(REWARDS, ONE)
    assert credit.values[1, :, 0].tolist() == pytest.approx(expected)
    assert credit.kept[1].tolist() == [value > 0 for value in expected]


def test_the_effective_sample_size_can_be_read_from_its_metrics():
    weight = torch.tensor([3.0, 1.0, 1.0, 0.5, 0.5, 0.1])
    output, _ = found(rwr.build(rwr.Config()), weight)
    mean, square = (float(output.metrics[name]) / M for name in ("policy/weight", "policy/weight_square"))
    assert M * mean**2 / square == pytest.approx(float(weight.sum() ** 2 / weight.square().sum()))


# ---- RAFT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]),
        ({"ties": True}, [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]),
        ({"best": 2}, [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]),
        ({"best": 2, "ties": True}, [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]),
        ({"skip_equal": False}, [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]),
        ({"skip_equal": False, "ties": True}, [[0, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]]),
        ({"best": 3, "skip_equal": False}, [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]]),
    ],
)
def test_the_best_of_each_prompt_are_kept(options, expected):
    """One sample is, unless there are ties; a failed one never is."""
    credit = raft.build(raft.Config(**options)).advantages(REWARDS, ONE)
    assert credit.kept.int().tolist() == expected
    assert torch.equal(credit.values[:, :, 0][credit.kept], torch.ones(int(credit.kept.sum())))


def test_a_prompt_without_any_score_keeps_nothing():
    cases: list[dict[str, Any]] = [{}, {"ties": True, "skip_equal": False}]
    for options in cases:
        credit = raft.build(raft.Config(**options)).advantages(torch.full((1, 1, 3), NAN), ONE)
        assert not credit.kept.any()


def test_keeping_the_whole_group_is_refused():
    with pytest.raises(ValueError, match="best=4 keeps every sample of a group of 4"):
        raft.Config(best=4).check_group(4)
    raft.Config(best=3).check_group(4)


@pytest.mark.parametrize("module", [rwr, raft])
@pytest.mark.parametrize(
    ("refresh", "copied_after"), [(40, [42, 81, 120]), (1, [3, 42, 81, 120]), (None, []), (0, []), (200, [])]
)
def test_the_network_that_draws_is_copied_when_it_is_due(module, refresh, copied_after):
    """At most once an iteration, here of 39 steps; an interruption in between changes nothing."""
    method, copied = module.build(module.Config(refresh=refresh)), []
    assert method.behaviour == ("policy" if refresh == 0 else "sampling")
    assert method.roles == (() if refresh == 0 else ("sampling",))
    for updates in (3, 42, 81, 120):
        resumed, weights = module.build(module.Config(refresh=refresh)), Moves()
        resumed.load_state_dict(method.state_dict())
        method = resumed
        method.after_iteration(updates, weights)
        assert weights in ([], [("sampling", 0.0)])
        copied += [updates] * len(weights)
    assert copied == copied_after


def test_the_pull_to_the_reference_is_added():
    """ORW-CFM-W2's term."""
    config = rwr.Config(kl=AnchorConfig(coef=3.0))
    pulled = found(rwr.build(config), torch.ones(M), reference=V + 0.1)[0].loss
    assert float(pulled - found(rwr.build(rwr.Config()), torch.ones(M))[0].loss) == pytest.approx(M * 3 * 0.01)


# ---- RAM


ADVANTAGE = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -0.5])


def test_without_advantage_it_is_regression_to_the_reference():
    method = ram.build(ram.Config())
    output, gradient = found(method, torch.zeros(M), reference=V, old=draw(5))
    assert float(output.loss) == float(gradient.abs().max()) == 0
    _, gradient = found(method, torch.zeros(M), reference=draw(4), old=draw(5))
    assert_close(gradient, 2 * (V - draw(4)) / 8)


def test_where_all_networks_agree_it_is_uniform_matching_times_its_strength():
    _, gradient = found(ram.build(ram.Config(strength=100.0)), ADVANTAGE, reference=V, old=V)
    assert_close(gradient, -2 * 100 * ADVANTAGE[:, None] * (TARGET - V) / 8, rtol=1e-6, atol=1e-9)


def test_its_target_is_the_reference_moved_by_the_old_networks_error():
    reference, old = draw(4), draw(5)
    output, _ = found(ram.build(ram.Config(strength=10.0)), ADVANTAGE, reference=reference, old=old)
    target = reference + 10 * ADVANTAGE[:, None] * (TARGET - old)
    assert float(output.loss) == pytest.approx(float((V - target).square().mean(dim=1).sum()))


def test_its_advantages_are_not_clipped():
    assert ram.Config().advantages.clip is None
