"""What every advantage rule must do, and the rules for several rewards and around the median against their formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.algorithms.dance_grpo import SeparateConfig
from flowrl.credit.advantages import AdvantageConfig, advantages, aggregate
from flowrl.losses.ratio import clipped_ratio_loss
from tests.credit import rules

NAN = float("nan")


# ---- what every rule must do


CONFIGS = {
    "group": AdvantageConfig(),
    "per_reward": AdvantageConfig(name="per_reward", std="group"),
    "per_reward_global": AdvantageConfig(name="per_reward", std="global"),
    "gdpo": AdvantageConfig(name="gdpo", std="group", ddof=1),
    "separate": SeparateConfig(name="separate", std="group"),
    "median": AdvantageConfig(name="median"),
    "best_of": AdvantageConfig(name="best_of"),
    "leave_one_out": AdvantageConfig(name="leave_one_out"),
    "smooth": AdvantageConfig(name="smooth", std="group"),
}
WEIGHTS = torch.tensor([1.0, 0.5, 0.0])


def draw(seed: int = 0, prompts: int = 4, samples: int = 5) -> torch.Tensor:
    """Three rewards of different scale, the second nearly binary; the last group is dead, the third watched only."""
    r = torch.rand(3, prompts, samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    r[1] = 10 * r[1].round()
    r[:2, -1] = torch.tensor([0.1, 1 / 3])[:, None]
    return r


@pytest.fixture(params=list(CONFIGS))
def config(request) -> AdvantageConfig:
    return CONFIGS[request.param]


def test_every_rule_gives_the_learner_what_it_needs(config):
    found = advantages(draw(), WEIGHTS, config)
    columns = 2 if config.name == "separate" else 1
    assert (found.values.shape, found.values.dtype) == ((4, 5, columns), torch.float32)
    assert (found.valid.shape, found.kept.shape, found.dead.shape) == ((4, 5), (4, 5), (4,))
    assert bool(found.valid.all())
    assert found.kept.sum(dim=1).tolist() == ([4, 4, 4, 0] if config.name == "median" else [5, 5, 5, 0])


def test_a_dead_group_is_exactly_zero_under_every_rule(config):
    """Also where the batch is normalised afterwards."""
    found = advantages(draw(), WEIGHTS, config)
    assert found.dead.tolist() == [False, False, False, True]
    assert found.values[3].abs().max() == 0
    assert not found.kept[3].any()
    nothing = advantages(draw()[:, 3:].expand(-1, 2, -1), WEIGHTS, config)
    assert nothing.values.abs().max() == 0
    assert nothing.dead.all()


@pytest.mark.parametrize("reward", [0, 1])
def test_a_masked_sample_counts_for_nothing_under_every_rule(config, reward):
    r = draw()
    whole = advantages(torch.cat([r[:, :, :2], r[:, :, 3:]], dim=2), WEIGHTS, config)
    r[reward, :, 2] = NAN
    found = advantages(r, WEIGHTS, config)
    assert not found.valid[:, 2].any()
    assert not found.kept[:, 2].any()
    assert found.values[:, 2].abs().max() == 0
    rest = [0, 1, 3, 4]
    assert_close(found.values[:, rest], whole.values)
    assert torch.equal(found.kept[:, rest], whole.kept)


def test_a_group_that_failed_as_a_whole_disturbs_no_other(config):
    r = draw()
    whole = advantages(r[:, 1:], WEIGHTS, config)
    r[0, 0] = NAN
    found = advantages(r, WEIGHTS, config)
    assert found.dead.tolist() == [True, False, False, True]
    assert found.values[0].abs().max() == 0
    assert_close(found.values[1:], whole.values)


def test_order_does_not_matter_under_any_rule(config):
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 2, 0, 1, 3])
    r = draw()
    before, after = advantages(r, WEIGHTS, config), advantages(r[:, rows][:, :, columns], WEIGHTS, config)
    assert_close(after.values, before.values[rows][:, columns])
    assert torch.equal(after.kept, before.kept[rows][:, columns])
    swapped = advantages(r[[1, 0, 2]], WEIGHTS[[1, 0, 2]], config)
    assert_close(swapped.values.sum(dim=2), before.values.sum(dim=2))


@pytest.mark.parametrize("name", ["group", "per_reward", "per_reward_global", "gdpo", "separate", "leave_one_out"])
def test_advantages_sum_to_zero_in_every_group_under_the_rules_with_a_mean(name):
    found = advantages(draw(), WEIGHTS, CONFIGS[name])
    assert_close(found.values.sum(dim=1), torch.zeros(4, found.values.shape[2]), rtol=0, atol=1e-5)


# ---- several rewards


def centred_over_std(r: torch.Tensor, ddof: int) -> torch.Tensor:
    """By its formula, [P, G] without constant groups."""
    return (r - r.mean(dim=1, keepdim=True)) / (r.std(dim=1, keepdim=True, correction=ddof) + 1e-4)


def test_per_reward_is_the_mix_grpo_sum_with_weights_rescaled():
    """advantage_aggr: sum of (w_k / sum w) A_k, one clip."""
    r = draw()[:2, :3]
    merged = (2 * centred_over_std(r[0], 1) + 6 * centred_over_std(r[1], 1)) / 8
    found = rules.by("per_reward", r, torch.tensor([2.0, 6.0]), ddof=1, clip=1.0)
    assert_close(found.values.squeeze(2).double(), merged.clamp(-1, 1), rtol=1e-5, atol=1e-6)
    again = rules.by("per_reward", r, torch.tensor([0.2, 0.6]), ddof=1, clip=1.0)
    assert_close(again.values, found.values)


def test_a_negative_weight_turns_its_reward_round_and_no_other():
    r = draw()[:2, :3]
    found = rules.by("per_reward", r, torch.tensor([1.0, -3.0]), clip=None)
    turned = rules.by("per_reward", torch.stack([r[0], -r[1]]), torch.tensor([1.0, 3.0]), clip=None)
    assert_close(found.values, turned.values)


@pytest.mark.parametrize("rule", ["per_reward", "gdpo", "separate"])
def test_one_reward_alone_is_plain_grpo(rule):
    """Coefficients (1, 0) are the single-reward loss."""
    r = draw()
    single = rules.alone("group", r[0])
    assert torch.equal(rules.by(rule, r[:1], torch.ones(1)).values, single.values)
    assert torch.equal(rules.by(rule, r, torch.tensor([1.0, 0.0, 0.0])).values, single.values)


def per_column_loss(log_ratio: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One clipped loss per reward, summed: what a method with separate losses does, [E]."""
    return torch.stack([clipped_ratio_loss(log_ratio, column, (0.1, 0.1))[0] for column in values.unbind(1)]).sum(0)


def test_separate_columns_carry_their_weight_into_the_loss():
    """DanceGRPO: final loss = sum of coef_k times the clipped loss of clip(A_k)."""
    r, weights = draw()[:2, :3], torch.tensor([0.7, 1.4])
    log_ratio = torch.linspace(-0.3, 0.3, 15)
    found = rules.by("separate", r, weights, ddof=1, eps=1e-8, clip=1.0)
    losses = []
    for reward in r:
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-8)).clamp(-1, 1)
        losses.append(clipped_ratio_loss(log_ratio, advantage.flatten().float(), (0.1, 0.1))[0])
    assert_close(per_column_loss(log_ratio, found.values.flatten(0, 1)), 0.7 * losses[0] + 1.4 * losses[1])


@pytest.mark.parametrize(("size", "same"), [(0.09, True), (0.3, False)])
def test_separate_losses_equal_one_of_the_summed_advantages_only_without_a_clip(size, same):
    values = torch.tensor([[1.0, -0.5], [-1.0, 2.0], [0.3, 0.2]])
    log_ratio = torch.log1p(torch.tensor([size, -size, size]))
    summed = clipped_ratio_loss(log_ratio, values.sum(1), (0.1, 0.1))[0]
    assert torch.allclose(per_column_loss(log_ratio, values), summed) == same


def test_gdpo_tells_apart_what_a_sum_of_rewards_makes_equal():
    """Groups {(0,0),(1,1)} and {(0,0),(1,0)}; +-.707 both in a sum, +-1.414 and +-.707 in GDPO."""
    r = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]]])
    ones = torch.ones(2)
    summed = rules.alone("group", aggregate(r, ones), ddof=1, eps=0.0).values.squeeze(2)
    assert_close(summed, 0.5**0.5 * torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]))
    expected = torch.tensor([[-(2**0.5), 2**0.5], [-(0.5**0.5), 0.5**0.5]])
    # The sum before the batch is normalised is `separate`'s.
    assert_close(rules.by("separate", r, ones, ddof=1, eps=0.0).values.sum(dim=2), expected)
    found = rules.by("gdpo", r, ones, ddof=1, eps=0.0).values.squeeze(2)
    assert_close(found, expected / expected.std())


def test_gdpo_is_the_official_code():
    """Eps 1e-4 and ddof 1 both times, weights on normalised advantages."""
    r, weights = draw()[:2, :3], torch.tensor([2.0, 0.5], dtype=torch.float64)
    summed = 2 * centred_over_std(r[0], 1) + 0.5 * centred_over_std(r[1], 1)
    official = (summed - summed.mean()) / (summed.std() + 1e-4)
    assert_close(rules.by("gdpo", r, weights, ddof=1).values.squeeze(2).double(), official, rtol=1e-5, atol=1e-6)


def test_gdpo_leaves_a_batch_of_mean_0_and_std_1():
    """The dead group's zeros belong to the batch."""
    values = rules.by("gdpo", draw(), WEIGHTS, ddof=1).values.double()
    assert float(values.mean()) == pytest.approx(0, abs=1e-7)
    # eps 1e-4 against a std near 1.
    assert float(values.std()) == pytest.approx(1, abs=3e-4)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.1, 100), shift=st.floats(-5, 5), which=st.integers(0, 1))
def test_gdpo_ignores_the_scale_of_any_single_reward(scale, shift, which):
    """Up to eps; exactly without."""
    r = draw()
    changed = r.clone()
    changed[which] = scale * changed[which] + shift
    before, after = (rules.by("gdpo", x[:, :3], WEIGHTS, eps=0.0).values for x in (r, changed))
    assert_close(after, before, rtol=1e-5, atol=1e-6)
    before, after = (rules.by("gdpo", x[:, :3], WEIGHTS).values for x in (r, changed))
    # eps 1e-4 against stds of 0.1 * 0.2 at the least: 0.5 %.
    assert_close(after, before, rtol=1e-2, atol=1e-2)


# ---- the median rule


def test_median_golden_value():
    """m .35, MAD .15, eps 1e-3."""
    found = rules.alone("median", torch.tensor([[0.1, 0.3, 0.35, 0.5, 0.9]]), eps=1e-3)
    assert_close(found.values[0, :, 0], torch.tensor([-1.656, -0.331, 0, 0.993, 3.642]), rtol=0, atol=5e-4)
    exact = torch.tensor([-0.25, -0.05, 0.0, 0.15, 0.55]) / (0.15 + 1e-3)
    assert_close(found.values[0, :, 0], exact, rtol=0, atol=1e-5)
    assert found.kept.tolist() == [[True, True, False, True, True]]


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8, 9])
def test_exactly_one_sample_per_group_is_zero_and_it_is_not_trained(samples):
    """Of an even number the lower median, as torch.median."""
    total = torch.rand(6, samples, generator=torch.Generator().manual_seed(1))
    found = rules.alone("median", total)
    zero = found.values.squeeze(2) == 0
    assert zero.sum(dim=1).tolist() == [1] * 6
    assert torch.equal(found.kept, ~zero)
    assert torch.equal(total[zero], total.median(dim=1).values)


def test_the_median_ignores_an_outlier():
    calm, wild = torch.tensor([[0.1, 0.3, 0.35, 0.5, 0.9]]), torch.tensor([[0.1, 0.3, 0.35, 0.5, 1.5]])
    before, after = rules.alone("median", calm).values, rules.alone("median", wild).values
    assert_close(after[:, :4], before[:, :4])
    assert float(after[0, 4, 0]) == 5.0


def test_a_deviation_of_zero_is_floored_by_the_std_of_the_group():
    """{0, 1, 1} gives -1000 in the official code."""
    total = torch.tensor([[0.0, 1.0, 1.0]])
    std = (2 / 9) ** 0.5
    found = rules.alone("median", total, clip=9.0, min_deviation=0.5, eps=1e-3)
    assert_close(found.values[0, :, 0], torch.tensor([-1 / (0.5 * std + 1e-3), 0.0, 0.0]))
    assert found.kept.tolist() == [[True, False, True]], "one of the two medians is trained, with advantage 0"
    assert float(rules.alone("median", total).values[0, 0, 0]) == -5.0
    hardly = rules.alone("median", total, clip=1e9, min_deviation=1e-9, eps=1e-3)
    assert float(hardly.values[0, 0, 0]) == pytest.approx(-1000)
