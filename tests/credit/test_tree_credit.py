"""Credit on trees, by hand: fusion, depth-wise comparison, propagation, pruning, per-step gains."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import branch_grpo, flow_grpo, g2rpo, tempflow_grpo, tp_grpo, tree_grpo
from flowrl.algorithms._tree import NodeConfig
from flowrl.contracts.grids import flow_schedule
from flowrl.credit.advantages import AdvantageConfig, aggregate
from flowrl.credit.tree_credit import (
    DepthWindow,
    LeafRewards,
    Scale,
    by_grain,
    by_path,
    depthwise,
    extremes,
    fuse,
    increments,
    parent_top1,
    propagated,
)
from flowrl.diffusion.plan import window
from flowrl.diffusion.tree_shapes import completions, offshoots, splits
from flowrl.run.collector import Collector
from flowrl.samplers import cps, dance_sde, flow_sde
from flowrl.samplers.base import LogProbForm, StepDistribution, density_scale, step_std
from flowrl.training.metrics import Sums
from tests.credit import rules
from tests.toys import ToyAdapter, learner_of, roll_out, rollout_of, sampling_of

NAN = math.nan
FOUR = splits(5, {0: 2, 2: 2}, range(4))
"""Root, two nodes, four leaves."""
BIG = splits(20, {0: 2, 3: 2, 6: 2, 9: 2}, range(19))
REWARDS = torch.tensor([[0.0, 1.0, 4.0, 3.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)


def on_tree(config, method, rewards: torch.Tensor, *, num_steps: int = 5, iteration: int = 1, paths=None) -> Any:
    """Credit by edge of a method for rewards [R, P, G] with weight 1 each: advantages whose `steps` are given."""
    algorithm, weights = method.build(config), torch.ones(len(rewards))
    plan = algorithm.plan(flow_schedule(num_steps), dance_sde.build(dance_sde.Config()), iteration, 0)
    leaves = LeafRewards(plan.tree, rewards, weights, paths)
    return algorithm.on_tree(algorithm.advantages(rewards, weights), leaves, iteration)


# ---- fusion


def test_an_edge_has_the_mean_reward_of_the_leaves_behind_it():
    values = fuse(REWARDS, FOUR)
    assert values[0, :, 0].tolist() == [0.5, 0.5, 3.5, 3.5]
    assert values[0, :, 1].tolist() == [0.5, 0.5, 3.5, 3.5], "no split in between"
    for k in (2, 3, 4):
        assert values[0, :, k].tolist() == [0.0, 1.0, 4.0, 3.0]
    root = values[0, [0, 2], 0].mean()
    assert float(root) == float(REWARDS[0].mean())


def test_a_masked_leaf_counts_for_nothing_and_nothing_alone_is_nan():
    values = fuse(torch.tensor([[NAN, 1.0, NAN, NAN]]), FOUR)
    assert values[0, :, 0].tolist()[:2] == [1.0, 1.0]
    assert values[0, 2:, 0].isnan().all()
    assert values[0, :, 3].isnan().tolist() == [True, False, True, True]


def test_path_weights_are_uniform_at_beta_0_and_prefer_the_likelier_way():
    log_probs = torch.zeros(1, 4, 5, dtype=torch.float64)
    log_probs[0, :, 2] = torch.tensor([-1.0, -3.0, -2.0, -2.0])
    log_probs[0, :, 4] = NAN
    assert by_path(log_probs, FOUR, 0.0).eq(1).all()
    weights = by_path(log_probs, FOUR, 1.0)
    # The ways behind the first edge: standardised to +1 and -1; behind the second one: alike.
    assert_close(weights[0, :2, 0] / weights[0, 1, 0], torch.tensor([math.exp(2.0), 1.0], dtype=torch.float64))
    assert weights[0, 2:, 0].tolist() == [1.0, 1.0]
    assert weights[0, :, 2].eq(1).all(), "one leaf is left"
    values = fuse(REWARDS[:1], FOUR, weights)
    share = math.exp(2) / (math.exp(2) + 1)
    assert float(values[0, 0, 0]) == pytest.approx(0.0 * share + 1.0 * (1 - share))


def test_path_weights_do_not_know_the_unit_of_the_log_prob():
    """A mean over dims or their sum: standardised, both say the same."""
    log_probs = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(by_path(log_probs, FOUR, 1.0), by_path(4096 * log_probs + 7, FOUR, 1.0))


# ---- depth


def depth(total: torch.Tensor, tree=FOUR, **options) -> torch.Tensor:
    return depthwise(fuse(total, tree), total, tree, Scale(**options))


def test_nodes_are_compared_with_the_unbiased_std_so_two_are_at_plus_and_minus_half_root_2():
    credit = depth(REWARDS[:1])
    assert_close(credit[0, :, 2], (REWARDS[0] - 2) / REWARDS[0].std(), atol=1e-6, rtol=0)
    assert_close(credit[0, :, 0], torch.tensor([-1, -1, 1, 1]) / math.sqrt(2), check_dtype=False, atol=1e-6, rtol=0)
    assert_close(depth(REWARDS[:1] * 1e-3)[0, :, 0], credit[0, :, 0], atol=1e-4, rtol=0)
    assert_close(
        depth(REWARDS[:1], ddof=0)[0, :, 0], torch.tensor([-1.0, -1, 1, 1]), check_dtype=False, atol=1e-6, rtol=0
    )


def test_the_last_step_and_equal_rewards_get_nothing():
    credit = depth(REWARDS)
    assert credit[:, :, 4].isnan().all(), "no noise, no edge to train"
    assert credit[1, :, :4].eq(0).all()


def test_a_floor_keeps_a_small_difference_small():
    narrow = torch.tensor([[0.0, 4.0, 0.1, 4.0]], dtype=torch.float64)
    assert float(depth(narrow)[0, 2, 0]) == pytest.approx(1 / math.sqrt(2), abs=1e-5)
    expected = 0.025 / (0.5 * float(narrow.std()))
    assert float(depth(narrow, floor=0.5)[0, 2, 0]) == pytest.approx(expected, rel=1e-5)


def test_adding_a_constant_changes_nothing_and_neither_does_a_positive_factor():
    total = torch.rand(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    credit = depth(total, BIG)
    for other in (depth(total + 3, BIG), depth(5 * total, BIG)):
        assert_close(other, credit, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_trees_of_a_prompt_are_compared_apart_or_together():
    two = torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]], dtype=torch.float64)
    apart, together = depth(two)[0, :, 0], depth(two, pool="prompt")[0, :, 0]
    assert_close(apart[::2], torch.tensor([-1, 1, -1, 1]) / math.sqrt(2), check_dtype=False, atol=1e-6, rtol=0)
    nodes = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert_close(together[::2], (nodes - 1.5) / nodes.std(), atol=1e-6, rtol=0)


def test_all_splits_at_step_0_with_the_whole_group_is_plain_grpo():
    """Every edge has the ordinary group advantage with the unbiased std."""
    flat = splits(5, {0: 8}, range(4))
    total = torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = rules.alone("group", total, eps=1e-8, ddof=1, clip=None).values.squeeze(2)
    credit = depth(total, flat)
    for k in range(4):
        assert_close(credit[..., k].float(), plain, atol=1e-6, rtol=1e-6)


def test_a_masked_node_enters_no_statistic():
    total = torch.tensor([[NAN, NAN, 4.0, 3.0]], dtype=torch.float64)
    credit = depth(total)
    assert credit[0, :2].isnan().all()
    assert credit[0, 2:, 0].isnan().all(), "one node is left, and nothing to compare it with"
    assert credit[0, 2, 2] == -credit[0, 3, 2] != 0


# ---- propagation


def test_leaf_advantages_flow_back_as_means():
    leaf = torch.tensor([[-1.0, 0.5, NAN, 2.0]], dtype=torch.float64)
    credit = propagated(leaf, FOUR)
    assert credit[0, :2, 0].tolist() == [-0.25, -0.25]
    assert credit[0, 2:, 0].tolist() == [2.0, 2.0]
    assert credit[0, :, 2].isnan().tolist() == [False, False, True, False]
    assert credit[0, :, 4].isnan().all()


def test_tree_grpo_propagates_the_prompts_own_advantages():
    config = tree_grpo.Config(children=2, window=2, clip_range=1e-3)
    rewards = torch.rand(1, 2, 8, generator=torch.Generator().manual_seed(4))
    credit = on_tree(config, tree_grpo, rewards)
    leaf = credit.values.squeeze(2).double()
    start = int((~credit.pruned[0, 0]).int().argmax())
    assert_close(credit.steps[:, ::2, start + 1].double(), leaf[:, ::2], atol=1e-6, rtol=1e-6)
    pairs = leaf.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, dim=1)
    assert_close(credit.steps[..., start].double(), pairs, atol=1e-6, rtol=1e-6)


def test_the_window_of_tree_grpo_starts_at_step_i_with_falling_chance():
    config = tree_grpo.Config(children=2, window=2)
    starts = [config.tree(6, iteration, 0).splits.index(True) for iteration in range(1, 801)]
    counts = torch.bincount(torch.tensor(starts), minlength=4)
    expected = 0.5 * 0.5 ** torch.arange(4) / (1 - 0.5**4)
    assert len(counts) == 4, "the last step never splits"
    assert_close(counts / 800, expected, atol=0.07, rtol=0)  # four standard deviations


# ---- steps


def test_children_of_a_step_are_compared_with_each_other_alone():
    tree = offshoots(4, [0, 1], 2)
    total = torch.tensor([[0.0, 1.0, 10.0, 30.0]], dtype=torch.float64)
    credit = depth(total, tree, pool="prompt", eps=0.0, ddof=0)
    assert credit[0, :2, 0].tolist() == [-1.0, 1.0]
    assert credit[0, 2:, 1].tolist() == [-1.0, 1.0]
    assert credit[0, 2:, 0].isnan().all(), "their way is deterministic there"
    assert credit[0, :2, 1].isnan().all()


def test_tempflow_pools_all_trees_of_a_prompt():
    config = tempflow_grpo.Config(children=2, steps=[0, 1], clip_range=1e-3)
    rewards = torch.tensor([[[0.0, 1.0, 10.0, 30.0, 2.0, 3.0, 20.0, 40.0]]])
    credit = on_tree(config, tempflow_grpo, rewards)
    first = torch.tensor([0.0, 1.0, 2.0, 3.0])
    expected = (first - first.mean()) / (first.std(correction=0) + 1e-4)
    assert_close(credit.steps[0, [0, 1, 4, 5], 0], expected, atol=1e-5, rtol=1e-5)
    assert credit.pruned[0, 0].tolist() == [False, True, True, True, True]


def test_grains_are_normalised_apart_and_summed():
    tree = offshoots(8, [0], 3, strides=(1, 2))
    total = torch.tensor([[0.0, 10.0, 1.0, 40.0, 2.0, 20.0]], dtype=torch.float64)
    scale = Scale(pool="prompt", eps=0.0, ddof=0)
    fine, coarse = total[0, ::2], total[0, 1::2]
    expected = sum((r - r.mean()) / r.std(correction=0) for r in (fine, coarse))
    credit = by_grain(total, tree, 2, scale)
    assert_close(credit[0, ::2, 0], expected)
    assert_close(credit[0, 1::2, 0], expected, msg="both ways of a child share its edge")
    single = offshoots(8, [0], 3)
    assert_close(
        by_grain(total[:, ::2], single, 1, scale),
        depth(total[:, ::2], single, pool="prompt", eps=0.0, ddof=0),
        equal_nan=True,
    )


def test_g2rpo_with_one_stride_and_one_step_is_group_advantage():
    rewards = torch.rand(1, 2, 4, generator=torch.Generator().manual_seed(6))
    credit = on_tree(g2rpo.Config(children=4, strides=[1], steps=[1], clip_range=1e-3), g2rpo, rewards)
    plain = rules.alone("group", rewards[0]).values.squeeze(2)
    assert_close(credit.steps[..., 1], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gain", ["whole", "long_term", "step"])
def test_a_steps_gain_by_hand(gain):
    """Rewards after 0, 1, 2 and 3 stochastic steps of three chains."""
    tree = completions(5, [0, 1, 2])
    rewards = torch.tensor([[0.0, -1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    gains = torch.tensor([[-1.0, 2.0, 1.0], [1.0, 0.0, -2.0], [3.0, -2.0, 1.0]], dtype=torch.float64)
    # Signs of d_t times that of D: (-, +, +), (-, 0, +), (+, -, +); a turn needs minus before plus.
    if gain == "whole":
        whole = torch.tensor([[2.0], [-1.0], [2.0]], dtype=torch.float64)
        turns = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.float64)
        gains = whole + turns * gains
    elif gain == "long_term":
        # Behind the first chain's turn the reward goes on rising: 2 - (-1). Behind the third's first one it falls.
        gains[0, 1] = 3.0
    expected = (gains - gains.mean(0)) / (gains.std(0, correction=0) + 1e-4)
    credit = increments(rewards, tree, gain=gain, turning=1.0, scale=Scale(pool="prompt", eps=1e-4, ddof=0))
    for chain in range(3):
        # The edges of a chain belong to its last leaf; a leaf that left earlier has none there.
        assert_close(credit[0, 4 * chain + 3, :3], expected[chain])
        assert credit[0, 4 * chain, :3].isnan().all()
        assert not credit[0, 4 * chain + 1, 0].isnan()
    assert credit[0, :, 3:].isnan().all()


def test_tp_grpo_credits_a_chain_of_one_step_with_its_whole_gain():
    rewards = torch.tensor([[[0.0, 1.0, 0.0, 3.0, 0.0, -1.0]]])
    cases: list[dict[str, Any]] = [{"gain": "step"}, {"gain": "long_term"}, {"turning": 0.0}]
    for options in cases:
        credit = on_tree(tp_grpo.Config(window=1, clip_range=1e-3, **options), tp_grpo, rewards)
        gain = torch.tensor([1.0, 3.0, -1.0])
        assert_close(credit.steps[0, 1::2, 0], (gain - 1) / (gain.std(correction=0) + 1e-4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("joint", [False, True])
def test_gains_are_compared_step_by_step_or_over_all_steps_of_a_prompt(joint):
    """DenseGRPO's credit, and that of Stepwise-Flow-GRPO; the gains of a chain add up to D."""
    tree, total = completions(6, [0, 1, 2, 3]), torch.rand(2, 15, generator=torch.Generator().manual_seed(3)).double()
    gains = total.reshape(2, 3, 5).diff(dim=2)  # [P, T, n]
    assert_close(gains.sum(dim=2), total.reshape(2, 3, 5)[..., -1] - total.reshape(2, 3, 5)[..., 0])
    dims = (1, 2) if joint else (1,)
    expected = (gains - gains.mean(dims, keepdim=True)) / (gains.std(dims, correction=0, keepdim=True) + 1e-4)
    scale = Scale(pool="prompt", eps=1e-4, ddof=0)
    credit = increments(total, tree, gain="step", turning=1.0, scale=scale, joint=joint)
    assert_close(credit[:, 4::5, :4], expected)
    equal = increments(torch.ones(2, 15), tree, gain="step", turning=1.0, scale=scale, joint=joint)
    assert not equal[:, 4::5, :4].any()


def test_of_chains_of_one_step_both_comparisons_are_one():
    rewards = torch.tensor([[[0.0, 1.0, 0.0, 3.0, 0.0, -1.0]]])
    one, other = (
        on_tree(tp_grpo.Config(window=1, gain="step", joint=joint, clip_range=1e-3), tp_grpo, rewards).steps
        for joint in (False, True)
    )
    assert_close(one, other, equal_nan=True)


def test_a_floor_keeps_a_small_gain_small():
    tree = completions(5, [0])
    rewards = torch.tensor([[0.0, 0.01, 8.0, 8.02]], dtype=torch.float64)
    options = {"gain": "step", "turning": 1.0}
    plain, held = (
        increments(rewards, tree, scale=Scale(pool="prompt", eps=0.0, ddof=0, floor=floor), **options)[0, 1::2, 0]
        for floor in (0.0, 0.5)
    )
    assert_close(plain, torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert_close(held[1], torch.tensor(0.005, dtype=torch.float64) / (0.5 * rewards.std(correction=0)))


# ---- masked leaves


def test_a_child_whose_picture_failed_at_one_stride_is_not_trained_and_the_others_are():
    tree = offshoots(8, [0], 4, strides=(1, 2))
    total = torch.tensor([[0.0, 10.0, NAN, 40.0, 2.0, 20.0, 3.0, 60.0]], dtype=torch.float64)
    credit = by_grain(total, tree, 2, Scale(pool="prompt", eps=0.0, ddof=0))[0, :, 0]
    assert credit[2:4].isnan().all(), "both ways of the child"
    fine, coarse = torch.tensor([0.0, 2.0, 3.0]), torch.tensor([10.0, 40.0, 20.0, 60.0])
    scores = [(r - r.mean()) / r.std(correction=0) for r in (fine, coarse)]
    expected = (scores[0] + scores[1][[0, 2, 3]]).double()
    assert_close(credit[[0, 4, 6]], expected, atol=1e-6, rtol=0, msg="each stride is compared among all it has")


@pytest.mark.parametrize(
    ("gain", "trained"),
    [
        ("step", [False, False, True, True]),  # d_1 and d_2 ask for R_1
        # D is known. Step 1 may have turned or not; so may step 2, of a known sign but after an unknown one; step 3
        # comes after an unknown sign, but falls against D, and step 4 rises after that.
        ("whole", [False, False, True, True]),
        ("long_term", [False, False, True, True]),
    ],
)
def test_a_step_whose_gain_a_masked_reward_leaves_open_is_not_trained(gain, trained):
    tree = completions(6, [0, 1, 2, 3])
    chains = torch.tensor([[0.0, NAN, 3.0, 2.0, 5.0], [0.0, 1.0, 2.0, 1.0, 4.0], [0.0, -1.0, 2.0, 3.0, 1.0]])
    credit = increments(chains.flatten()[None], tree, gain=gain, turning=1.0, scale=Scale(pool="prompt"))
    assert (~credit[0, 4, :4].isnan()).tolist() == trained
    assert not credit[0, [9, 14], :4].isnan().any(), "of the other chains nothing is masked"
    if gain == "whole":
        # The first step is known to be none, where R_1 is not known but no turn has weight, or D is.
        free = increments(chains.flatten()[None], tree, gain=gain, turning=0.0, scale=Scale(pool="prompt"))
        assert not free[0, 4, :4].isnan().any()
        chains[0, 0] = NAN
        lost = increments(chains.flatten()[None], tree, gain=gain, turning=1.0, scale=Scale(pool="prompt"))
        assert lost[0, 4, :4].isnan().all(), "D is not known"


def test_a_step_that_falls_against_the_whole_is_no_turning_point_whatever_came_before():
    """R_1 is masked: d_2 is not known, but step 3 goes against D, so it is credited with D alone."""
    tree = completions(6, [0, 1, 2])
    chains = torch.tensor([[0.0, NAN, 3.0, 2.0], [0.0, 1.0, 2.0, 5.0], [0.0, 1.0, 0.0, 3.0]], dtype=torch.float64)
    credit = increments(chains.flatten()[None], tree, gain="whole", turning=1.0, scale=Scale(pool="prompt", eps=0.0))
    gains = torch.tensor([2.0, 5.0, 3.0 + 3.0], dtype=torch.float64)
    assert_close(credit[0, 3::4, 2], (gains - gains.mean()) / gains.std())


# ---- nothing to compare with


def test_what_is_alone_at_its_step_is_not_trained_and_equals_are_at_0():
    late = splits(5, {1: 2}, range(4))
    credit = depth(torch.tensor([[0.0, 1.0, 2.0, 5.0]], dtype=torch.float64), late)
    assert credit[0, :, 0].isnan().all(), "before the first split of a tree"
    assert credit[0, :, 1:4].isfinite().all()
    assert depth(torch.ones(1, 4, dtype=torch.float64), late)[0, :, 1:4].eq(0).all()
    pooled = depth(torch.tensor([[0.0, 1.0, 2.0, 5.0]], dtype=torch.float64), late, pool="prompt")
    assert pooled[0, :, 0].isfinite().all(), "two trees have two nodes there"


def test_an_iteration_in_which_nothing_can_be_compared_updates_nothing():
    """One child of each step could be scored: the rewards differ, and no step has two of them."""
    config = tempflow_grpo.Config(children=2, steps=[0, 1], clip_range=1e-3)
    method, sampler = tempflow_grpo.build(config), dance_sde.build(dance_sde.Config(eta=0.5))
    session = roll_out(ToyAdapter(), algorithm=method, sampler=sampler, prompts=1, group=4)
    rewards = torch.tensor([[[0.0, NAN, 1.0, NAN]]])
    rollout, before = rollout_of(session, rewards), [p.clone() for p in session.adapter.network.parameters()]
    credit = method.on_tree(method.advantages(rewards, torch.ones(1)), rollout.leaf_rewards(torch.ones(1)), 1)
    assert not credit.dead.any()
    assert credit.pruned is not None
    assert credit.pruned.all()
    sums = Sums()
    learner_of(session).update(1, rollout, credit, sums, gate=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, session.adapter.network.parameters(), strict=True))
    assert sums.means()["nfe/train"] == 0


@pytest.mark.parametrize(
    ("module", "config", "values"),
    [
        (branch_grpo, branch_grpo.Config(splits=[0, 2], clip_range=1e-3), [1.0] * 4 + [0.0] * 4),
        (tp_grpo, tp_grpo.Config(window=2, clip_range=1e-3), [0.0, 1.0, 0.0] + [0.0] * 3),
    ],
    ids=["trees that are equal inside", "chains of equal gain"],
)
def test_a_first_update_whose_credit_is_all_0_is_no_error(module, config, values):
    """The rewards differ, so the group is not dead, and no two nodes that are compared do: there is nothing to learn.

    No gradient at the first update is else the sign of a loss that does not reach the weights.
    """
    method, sampler = module.build(config), dance_sde.build(dance_sde.Config(eta=0.5))
    session = roll_out(ToyAdapter(), algorithm=method, sampler=sampler, prompts=1, group=len(values))
    rewards = torch.tensor([[values]])
    rollout = rollout_of(session, rewards)
    credit = method.on_tree(method.advantages(rewards, torch.ones(1)), rollout.leaf_rewards(torch.ones(1)), 1)
    assert not credit.dead.any()
    assert credit.steps is not None
    assert credit.steps[~credit.pruned].eq(0).all()
    learner, sums = learner_of(session, updates=1), Sums()
    learner.update(1, rollout, credit, sums)
    assert learner.optimizer.updates == 1
    assert sums.means()["grad/norm"] == 0


def test_a_first_update_whose_loss_does_not_reach_the_weights_is_an_error():
    class Lost(flow_grpo.FlowGrpo):
        def loss(self, batch, networks):
            output = super().loss(batch, networks)
            return replace(output, loss=1 + 0 * output.loss)

    session = roll_out(ToyAdapter(), algorithm=Lost(flow_grpo.Config(clip_range=1e-3)))
    rewards = torch.arange(6.0).reshape(1, 2, 3)
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    with pytest.raises(RuntimeError, match="does not reach the weights"):
        learner_of(session, updates=1).update(1, rollout_of(session, rewards), credit, Sums())


# ---- the weight of a step


@pytest.mark.parametrize("merge", [1, 2])
def test_tempflows_weight_is_over_all_steps_that_may_branch(merge):
    """Whichever are drawn in an iteration, a step has the weight that it has when all of them branch."""
    sampler = flow_sde.build(flow_sde.Config(noise_level=0.7))
    found: dict[int, float] = {}
    for count, iterations in ((None, 1), (1, 20)):
        config = tempflow_grpo.Config(children=2, steps_per_iteration=count, merge=merge, clip_range=1e-3)
        method: Any = tempflow_grpo.build(config)  # of stand-ins for its batch and networks
        for iteration in range(1, iterations + 1):
            plan = method.plan(flow_schedule(6), sampler, iteration, 0)
            group = SimpleNamespace(sampler=sampler, adapter=ToyAdapter())
            step = plan.steps(torch.tensor(plan.train), group.adapter.process)
            std = step_std(sampler, group.adapter.process, step)
            weight = method.weight(std, SimpleNamespace(plan=plan), SimpleNamespace(policy=group)).tolist()
            if count is None:
                assert_close(torch.tensor(weight), std / std.mean(), rtol=0, atol=0)
                found = dict(zip(plan.train, weight, strict=True))
            else:
                assert weight == [found.pop(plan.train[0], weight[0])]
    assert not found, "every step was drawn"


def test_with_cps_tempflow_weighs_a_step_as_a_gaussian_of_its_noise():
    """The gradient of a step's mean is that of the Gaussian log-prob with w_i = std_i, times a number for all steps."""
    config = tempflow_grpo.Config(children=2, clip_range=1e-5)
    method: Any = tempflow_grpo.build(config)
    sampler = cps.build(cps.Config(noise_level=0.5))
    plan, group = method.plan(flow_schedule(6), sampler, 1, 0), SimpleNamespace(sampler=sampler, adapter=ToyAdapter())
    std = step_std(sampler, group.adapter.process, plan.steps(torch.tensor(plan.train), group.adapter.process))
    weight = method.weight(std, SimpleNamespace(plan=plan), SimpleNamespace(policy=group))
    assert_close(weight.mean(), torch.tensor(1.0))
    gradients = []
    forms: tuple[tuple[LogProbForm, torch.Tensor], ...] = (("mean", std), ("unscaled", weight))
    for form, factor in forms:
        mean = torch.zeros(len(std), 8, requires_grad=True)
        noise = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(len(std), 8)
        ahead = StepDistribution(mean, std).log_prob(std[:, None] * noise, form)
        gradients.append(torch.autograd.grad((factor * ahead).sum(), mean)[0])
    ratio = gradients[1] / gradients[0]
    assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="noise_weight=released is for Gaussian"):
        tempflow_grpo.Config(children=2, noise_weight="released").check(sampler, 6)


# ---- the likelihood of a path


@pytest.mark.parametrize("sampler", [cps.build(cps.Config(noise_level=0.5)), flow_sde.build(flow_sde.Config())])
def test_scaled_log_probs_are_those_of_a_gaussian_but_for_a_constant_of_the_step(sampler):
    """With CPS the quieter steps of a path would else hardly count."""
    process, steps = ToyAdapter().process, torch.arange(6)
    step = window(flow_schedule(6), 0.5, None).steps(steps, process)
    std, scale = step_std(sampler, process, step), density_scale(sampler, process, step)
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0))
    for k in steps[:-1]:
        there = StepDistribution(torch.zeros(2, 8), std[k].expand(2))
        own, gaussian = there.log_prob(x[k], sampler.log_prob_form), there.log_prob(x[k], "mean")
        assert_close(scale[k] * (own[0] - own[1]), gaussian[0] - gaussian[1], rtol=1e-4, atol=1e-6)
    assert scale[-1] == 1, "a step without noise"


# ---- pruning


def edges_left(left_out: torch.Tensor) -> int:
    """Distinct edges of the first prompt that stay."""
    return sum(len({int(c) for leaf, c in enumerate(BIG.child(k)) if not left_out[0, leaf, k]}) for k in range(20))


def test_parent_top1_leaves_138_of_218_edges():
    total = torch.rand(1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    left_out = parent_top1(fuse(total, BIG), BIG)
    assert edges_left(torch.zeros_like(left_out)) == 218
    assert edges_left(left_out) == 138
    assert not left_out[..., :10].any(), "the split's own edges stay"
    kept = ~left_out[0, :, 10]
    for pair in range(8):
        better = int(total[0, 2 * pair : 2 * pair + 2].argmax())
        assert kept[2 * pair : 2 * pair + 2].tolist() == [better == 0, better == 1]


def test_parent_top1_prefers_a_scored_child_and_the_first_of_equals():
    left_out = parent_top1(fuse(torch.tensor([[NAN, 0.0, 1.0, 1.0]]), FOUR), FOUR)
    assert left_out[0, :, 3].tolist() == [True, False, False, True]


def test_extremes_keep_the_best_and_the_worst_ways():
    total = torch.arange(16.0).roll(5)[None]
    left_out = extremes(total, BIG, 4)
    assert edges_left(left_out) == 138
    kept = total[0][~left_out[0, :, 12]].sort().values.tolist()
    assert kept == [0, 1, 2, 3, 12, 13, 14, 15]
    with pytest.raises(ValueError, match="do not fit"):
        extremes(total, BIG, 9)


@pytest.mark.parametrize("successes", [2, 14])
def test_of_equal_leaves_best_and_worst_are_not_the_same(successes):
    """Eight leaves stay, whatever ties; the masked ones are none of them."""
    total = (torch.arange(16.0) < successes).double()[None]
    kept = ~extremes(total, BIG, 4)[0, :, 12]
    assert kept.sum() == 8
    assert kept.nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 12, 13, 14, 15], "equals in the order of the leaves"
    holed = total.clone()
    holed[0, ::3] = NAN
    kept = ~extremes(holed, BIG, 4)[0, :, 12]
    assert kept.sum() == 8
    assert not kept[::3].any()


@pytest.mark.parametrize(
    ("options", "iteration", "steps"),
    [
        ({}, 1, range(9, 13)),
        ({}, 30, range(9, 13)),
        ({}, 31, range(10, 14)),
        ({}, 10_000, range(15, 19)),
        ({"stop": 10}, 31, range(9, 11)),
        ({"stop": 15}, 10_000, range(12, 16)),
        ({"direction": "earlier", "size": 3, "start": 14}, 1, range(14, 17)),
        ({"direction": "earlier", "size": 3, "start": 14}, 61, range(12, 15)),
        ({"direction": "earlier", "size": 3, "start": 14}, 10_000, range(9, 12)),
        ({"direction": "earlier", "size": 3, "start": 14, "stop": 4}, 10_000, range(4, 7)),
    ],
)
def test_a_depth_window_slides_one_step_at_a_time_until_it_stops(options, iteration, steps):
    assert DepthWindow(**options).steps(BIG, iteration) == steps


@pytest.mark.parametrize(
    "options", [{"prune": "parent_top1"}, {"prune": "extremes", "keep": 2}, {"depth": DepthWindow(size=2)}]
)
def test_pruning_changes_no_advantage_that_stays(options):
    shape = {"splits": [0, 2, 4], "clip_range": 1e-3}
    rewards = torch.rand(1, 2, 8, generator=torch.Generator().manual_seed(9))
    whole = on_tree(branch_grpo.Config(**shape), branch_grpo, rewards, num_steps=8)
    some = on_tree(branch_grpo.Config(**shape, **options), branch_grpo, rewards, num_steps=8)
    assert_close(some.steps, whole.steps, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(some.values, whole.values)
    assert (some.pruned & ~whole.pruned).any()
    assert not (whole.pruned & ~some.pruned).any()


def test_mix_trains_splits_and_its_window_alone():
    config = branch_grpo.Config(splits=[0, 3], mix=branch_grpo.MixWindow(strategy="frozen", size=2), clip_range=1e-3)
    credit = on_tree(config, branch_grpo, torch.rand(1, 1, 4), num_steps=8)
    assert (~credit.pruned[0, 0]).nonzero().squeeze(1).tolist() == [0, 1, 3]


# ---- several rewards, masks, clips


def test_rewards_are_compared_together_or_apart():
    rewards = torch.rand(2, 1, 4, generator=torch.Generator().manual_seed(8))
    shape = {"splits": [0, 2], "clip_range": 1e-3}
    together = on_tree(branch_grpo.Config(**shape), branch_grpo, rewards)
    total = aggregate(rewards, torch.ones(2))
    assert_close(together.steps.double(), depth(total), atol=1e-5, rtol=1e-5, equal_nan=True)
    apart = NodeConfig(name="per_reward")
    credit = on_tree(branch_grpo.Config(**shape, advantages=apart), branch_grpo, rewards)
    expected = torch.stack([depth(r.double()) for r in rewards]).mean(0)
    assert_close(credit.steps.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_dead_and_masked_leaves_train_nothing_and_advantages_are_clipped():
    rewards = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [NAN, NAN, 0.0, 1.0], [0.0, 0.0, 0.0, 9.0]]])
    config = branch_grpo.Config(splits=[0, 2], clip_range=1e-3, advantages=NodeConfig(clip=1.0))
    credit = on_tree(config, branch_grpo, rewards)
    assert credit.pruned[0].all(), "all rewards are equal"
    assert credit.pruned[1, :2].all()
    assert not credit.pruned[1, 2:, 2:4].any()
    assert credit.pruned[1, 2:, :2].all(), "their node is alone there"
    assert float(credit.steps[2].nan_to_num().max()) == 1.0


def test_path_weights_reach_the_credit():
    rewards, paths = REWARDS[:1].float()[None], torch.zeros(1, 4, 5)
    paths[0, :, 2] = torch.tensor([-1.0, -3.0, -1.0, -3.0])
    config = tree_grpo.Config(children=2, window=2, path_weight=1.0, clip_range=1e-3)
    assert tree_grpo.build(config).weighs_paths
    assert not tree_grpo.build(tree_grpo.Config()).weighs_paths
    start = on_tree(config, tree_grpo, rewards, paths=paths).pruned[0, 0].int().argmin()
    paths = paths.roll(int(start) + 1 - 2, dims=2)
    plain, weighted = (on_tree(config, tree_grpo, rewards, paths=p) for p in (None, paths))
    share = math.exp(2) / (math.exp(2) + 1)
    leaf = plain.values[0, :, 0]
    assert_close(weighted.steps[0, 0, start], share * leaf[0] + (1 - share) * leaf[1], atol=1e-5, rtol=1e-5)
    assert_close(plain.steps[0, 0, start], leaf[:2].mean(), atol=1e-6, rtol=1e-6)


def test_the_leaf_that_a_rule_leaves_out_is_not_trained():
    config = tree_grpo.Config(children=3, window=1, advantages=AdvantageConfig(name="median"), clip_range=1e-3)
    credit = on_tree(config, tree_grpo, torch.tensor([[[0.1, 0.9, 0.5]]]))
    step = int(credit.pruned[0].all(dim=0).int().argmin())
    assert credit.kept[0].tolist() == [True, True, False], "the median itself"
    assert credit.pruned[0, :, step].tolist() == [False, False, True]
    assert torch.equal(credit.steps[0, :2, step], credit.values[0, :2, 0])


# ---- processes


@pytest.mark.parametrize("sampler", [dance_sde.build(dance_sde.Config(eta=0.5)), cps.build(cps.Config())])
def test_log_probs_along_the_ways_are_the_same_table_whichever_process_drew_a_tree(sampler):
    """Two prompts, each with trees on both of two processes; every leaf has the numbers of the edges on its way."""
    method = branch_grpo.build(branch_grpo.Config(splits=[0, 2], path_weight=1.0, clip_range=1e-3))
    session = roll_out(ToyAdapter(), algorithm=method, sampler=sampler, group=12)
    sampling = sampling_of(session.adapter, [], sampler)
    scale = sampling.path_scale(session.plan)
    tree, edges, rewards = session.plan.tree, session.edges, torch.zeros(1, 2, 12)
    assert tree is not None
    place = zip(edges.sample.tolist(), edges.step.tolist(), strict=True)
    drawn = dict(zip(place, edges.old_log_prob, strict=True))
    expected = torch.full((2, 12, len(session.plan)), NAN)
    for leaf, own in enumerate(session.ids):
        for k in session.plan.train:
            first = leaf - leaf % tree.leaves
            expected[own.slot, own.sample, k] = scale[k] * drawn[first + int(tree.child(k)[leaf - first]), k]

    def found(parts: list[list[int]]) -> torch.Tensor:
        """As the last of the processes has it, of which each drew the samples `parts`."""
        told: list = []
        world = SimpleNamespace(gather=lambda own: told.append(own) or told)
        maker: Any = SimpleNamespace(method=method, world=world, sampling=sampling)
        table: Any = None
        for rows in parts:
            own = torch.isin(edges.sample, torch.tensor(rows))
            place = torch.searchsorted(torch.tensor(rows), edges.sample[own])
            mine = replace(edges.select(own.nonzero().squeeze(1)), sample=place)
            samples = replace(session.samples, ids=tuple(session.ids[row] for row in rows))
            table = Collector._paths(maker, replace(session.drawn, samples=samples, edges=mine), rewards)
        return table

    whole = list(range(24))
    assert torch.equal(found([whole]).nan_to_num(9), expected.nan_to_num(9))
    split = found([[*range(4), *range(16, 24)], [*range(4, 16)]])
    assert torch.equal(split.nan_to_num(9), expected.nan_to_num(9))
    assert expected[..., -1].isnan().all()
    assert expected[..., :-1].isfinite().all()
    assert bool((scale == 1).all()) == (sampler.log_prob_form != "unscaled")
