"""The group rule against the official code, its options, and the configuration of all rules."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.credit.advantages import AdvantageConfig, Advantages, advantages, aggregate
from tests.credit import rules
from tests.tables import table

NAN = float("nan")
RULES = ["global", "group", "none"]
# Rewards on a grid of 1/64: differences are exact, so that a group is either constant or clearly not.
tables = arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(2, 6)), elements=st.integers(-640, 640)).map(
    lambda a: torch.from_numpy(a).double() / 64
)


def group(total: torch.Tensor, **options) -> Advantages:
    """The group rule with its single column dropped: values [P, G]."""
    found = rules.alone("group", total, **options)
    return dataclasses.replace(found, values=found.values.squeeze(2))


def expected(total: torch.Tensor, std: str, eps: float = 1e-4) -> np.ndarray:
    """stat_tracking.py of the official code: numpy, ddof 0, std + 1e-4."""
    r = total.double().numpy()
    centred = r - r.mean(axis=1, keepdims=True)
    scale = {"global": r.std(), "group": r.std(axis=1, keepdims=True), "none": 1 - eps}[std]
    return centred / (scale + eps)


@pytest.mark.parametrize("std", RULES)
@settings(max_examples=60, deadline=None)
@given(total=tables)
def test_advantages_are_those_of_the_official_code(std, total):
    found = group(total, std=std, clip=None).values
    # float64 inside; only the result is rounded to float32.
    assert_close(found.double(), torch.from_numpy(expected(total, std)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("std", ["global", "group"])
@settings(max_examples=60, deadline=None)
@given(total=tables, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
def test_advantages_ignore_affine_reward_changes(std, total, scale, shift):
    """Exact where eps is 0."""
    before = group(total, std=std, eps=0.0, clip=None)
    after = group(scale * total + shift, std=std, eps=0.0, clip=None)
    # scale * r + shift rounds at 2^-53 * 105 (float64) against a spread of at least 1/64: 1e-11 relative.
    live = ~before.dead
    assert_close(after.values[live], before.values[live], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("std", RULES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3e5, 1e-30])
def test_a_constant_group_gets_exactly_zero_and_is_dead(std, value):
    """Also with a global std: 0.1 thirteen times has a mean that is not 0.1."""
    total = torch.full((2, 13), value, dtype=torch.float64)
    total[1] += torch.arange(13)
    found = group(total, std=std, eps=0.0)
    assert found.values[0].tolist() == [0.0] * 13
    assert found.dead.tolist() == [True, False]
    assert bool((found.values[1] != 0).any())


@pytest.mark.parametrize("std", RULES)
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 5.0, NAN], [5.0, 5.0, NAN]])
def test_a_group_without_two_different_scores_is_dead(std, row):
    found = group(torch.tensor([row, [0.0, 1.0, 2.0]]), std=std)
    assert found.dead.tolist() == [True, False]
    assert found.values[0].tolist() == [0.0, 0.0, 0.0]
    assert bool(found.values.isfinite().all())


def test_an_infinite_reward_is_masked_like_a_failed_one():
    found = group(torch.tensor([[1.0, float("inf"), 3.0]]))
    assert found.valid.tolist() == [[True, False, True]]
    assert bool(found.values.isfinite().all())


def test_advantages_are_clipped_after_scaling():
    total = torch.cat([torch.zeros(1, 99), torch.ones(1, 1)], dim=1)  # the one stands 9.9 std away
    assert float(group(total, clip=None).values.max()) == pytest.approx(9.94, abs=0.01)
    assert float(group(total, clip=5.0).values.max()) == 5.0
    assert float(group(-total, clip=5.0).values.min()) == -5.0


def test_rewards_that_differ_by_float_noise_get_next_to_no_advantage():
    """An additive eps keeps them small, where max(std, eps) alone would not below 1e-6."""
    total = 0.5 + torch.tensor([[0.0, 6e-8, -6e-8, 0.0]], dtype=torch.float64)
    assert float(group(total).values.abs().max()) < 1e-3


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3, 4)])
def test_rewards_that_are_no_table_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \[R, P, G\]"):
        group(torch.zeros(shape))


def test_rewards_add_up_raw_with_their_weights():
    """Flow-GRPO: weights are not rescaled."""
    rewards = torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]])
    assert aggregate(rewards, torch.tensor([2.0, 0.5])).tolist() == [[7.0, 14.0]]


def test_a_reward_of_weight_zero_is_only_logged_even_where_it_failed():
    rewards = torch.tensor([[[1.0, 2.0]], [[NAN, 20.0]]])
    assert aggregate(rewards, torch.tensor([1.0, 0.0])).tolist() == [[1.0, 2.0]]
    assert aggregate(rewards, torch.tensor([1.0, 1.0])).isnan().tolist() == [[True, False]]


def test_rewards_that_all_have_weight_zero_are_refused():
    with pytest.raises(ValueError, match="weight 0"):
        aggregate(torch.zeros(2, 1, 2), torch.zeros(2))


# ---- options of the std


@settings(max_examples=40, deadline=None)
@given(total=tables)
def test_with_ddof_1_advantages_are_those_of_dance_grpo(total):
    """Torch std + 1e-8 per prompt, then the clip at 5."""
    found = group(total, ddof=1, eps=1e-8)
    official = (total - total.mean(dim=1, keepdim=True)) / (total.std(dim=1, keepdim=True) + 1e-8)
    assert_close(found.values.double(), official.clamp(-5, 5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("std", ["global", "group"])
@pytest.mark.parametrize(("ratio", "dropped"), [(0.0, 0), (0.1, 0), (0.25, 1), (0.5, 2), (0.74, 3)])
def test_trimmed_statistics_leave_out_the_lowest_rewards(std, ratio, dropped):
    """Mean and std after dropping the lowest int(G q); every sample keeps an advantage."""
    total = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = total.sort(dim=1).values[:, dropped:]
    scale = kept.std(dim=1, keepdim=True) if std == "group" else kept.std()
    found = group(total, std=std, trimmed_ratio=ratio, ddof=1, eps=1e-8, clip=None)
    assert_close(found.values.double(), (total - kept.mean(dim=1, keepdim=True)) / (scale + 1e-8), rtol=1e-6, atol=1e-6)


def test_trimming_counts_only_the_samples_that_are_not_masked():
    masked = group(torch.tensor([[NAN, 1.0, NAN, 2.0, 4.0, 9.0]]), trimmed_ratio=0.3)
    alone = group(torch.tensor([[1.0, 2.0, 4.0, 9.0]]), trimmed_ratio=0.3)
    assert torch.equal(masked.values[0, [1, 3, 4, 5]], alone.values[0])
    assert masked.values[0, [0, 2]].tolist() == [0.0, 0.0]


def test_the_number_of_trimmed_samples_is_rounded_in_float64():
    """int(100 * 0.29) is 28 in float64; float32 would say 29."""
    total = torch.arange(100.0, dtype=torch.float64)[None]
    mean = total[0, 28:].mean()
    assert_close(group(total, std="none", trimmed_ratio=0.29, clip=None).values[0].double(), total[0] - mean)


# ---- the configuration


def test_the_defaults_are_those_of_flow_grpo():
    r, weights = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 0.5])
    official = rules.alone("group", aggregate(r, weights), std="global", eps=1e-4, clip=5.0)
    assert torch.equal(advantages(r, weights, AdvantageConfig()).values, official.values)


@pytest.mark.parametrize(
    ("options", "message"),
    table(__file__, "refused_advantages"),
)
def test_an_option_out_of_range_is_refused_with_its_name(options, message):
    with pytest.raises(ConfigError, match=message):
        validate(AdvantageConfig, options, "algorithm.advantages")


def test_what_a_group_is_too_small_for_is_refused():
    config = AdvantageConfig(trimmed_ratio=0.75)
    assert advantages(torch.rand(1, 2, 8), torch.ones(1), config).values.shape == (2, 8, 1)
    with pytest.raises(ValueError, match=r"leaves fewer than 2 of 4 samples.*below 0.75"):
        advantages(torch.rand(1, 2, 4), torch.ones(1), config)
