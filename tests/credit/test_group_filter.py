"""Edit-R1's filter of groups, which every method with an advantage rule has."""

import dataclasses

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Method
from flowrl.core import registry
from flowrl.core.errors import OptionError
from flowrl.credit.groups import group_moments
from flowrl.credit.selection import FilterConfig
from flowrl.credit.tree_credit import LeafRewards

GROUPS = {
    "varied": [0.2, 0.8, 0.5, 0.1],
    "flat": [0.50, 0.52, 0.5, 0.51],
    "solved and flat": [0.99, 0.98, 1.0, 0.99],
    "solved and varied": [1.0, 1.0, 1.0, 0.7],
}
TOTAL = torch.tensor(list(GROUPS.values()))
ONE = torch.ones(1)
STEPS = 10


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(registry.load("algorithms", name).Config)}


FILTERED = [name for name in registry.names("algorithms") if "filter" in fields(name)]


def build(name: str, filter: FilterConfig | None = None) -> Method:
    module = registry.load("algorithms", name)
    own = {"baseline": "group"} if name == "find" else {}
    return module.build(module.Config(filter=filter, **own))


def rewards_of(method: Method) -> Tensor:
    """The groups above, repeated to the samples that the method needs, [1, P, G]."""
    leaves = method.config.leaves(STEPS)
    return TOTAL.repeat(1, leaves * 4).reshape(1, len(TOTAL), -1)


def credit_of(method: Method):
    """Credit as of a session."""
    rewards = rewards_of(method)
    credit = method.advantages(rewards, ONE, [(name, ()) for name in GROUPS])
    tree = method.config.tree(STEPS, 1, 0)
    if tree is None:
        return credit, credit.kept
    assert isinstance(method, EdgeMethod)
    paths = torch.zeros(*rewards.shape[1:], STEPS) if method.weighs_paths else None
    credit = method.on_tree(credit, LeafRewards(tree, rewards, ONE, paths), 1)
    assert credit.pruned is not None
    return credit, ~credit.pruned


def test_groups_without_spread_or_nearly_solved_are_left_out():
    assert FilterConfig().useful(TOTAL).tolist() == [True, False, False, False]
    assert FilterConfig(most_mean=float("inf")).useful(TOTAL).tolist() == [True, False, False, True]
    assert FilterConfig(least_std=0.0).useful(TOTAL).tolist() == [True, True, False, False]


def test_only_prompts_that_are_both_are_retired_and_only_where_asked():
    retiring = FilterConfig(retire=True)
    assert retiring.retired(TOTAL).tolist() == [False, False, True, False]
    assert not FilterConfig().retired(TOTAL).any()
    failed = TOTAL.clone()
    failed[2, 1:] = torch.nan
    assert not retiring.retired(failed).any(), "one sample alone has no spread"


def test_moments_are_of_the_scored_samples():
    std, mean = group_moments(torch.tensor([[0.5, 2.5, float("nan"), 3.0]], dtype=torch.float64))
    total = torch.tensor([0.5, 2.5, 3.0], dtype=torch.float64)
    assert float(mean) == pytest.approx(float(total.mean()))
    assert float(std) == pytest.approx(float(total.std(correction=0)))


def test_methods_with_groups_share_the_filter():
    assert {"flow_grpo", "dance_grpo", "diffusion_nft", "awm", "branch_grpo", "online_dpo", "find"} <= set(FILTERED)
    assert not {"diffusion_dpo", "dpok", "draft", "raft"} & set(FILTERED)


@pytest.mark.parametrize("name", FILTERED)
def test_a_method_trains_the_useful_groups_alone_and_as_without_the_filter(name):
    """The std of the iteration is taken before the filter, so values stay."""
    plain, trained = credit_of(build(name))
    found, kept = credit_of(build(name, FilterConfig(least_std=0.05, most_mean=0.8)))
    assert torch.equal(found.values[0], plain.values[0])
    assert torch.equal(kept[0], trained[0])
    assert bool(kept[0].any())
    assert not bool(kept[1:].any())
    assert bool(trained[1:].any()), "without it they are trained"
    if name != "online_dpo":  # a pair is chosen among the samples that are left
        assert torch.equal(found.values, plain.values)
    if found.steps is not None and plain.steps is not None:
        assert torch.equal(found.steps[0].nan_to_num(9.0), plain.steps[0].nan_to_num(9.0))


@pytest.mark.parametrize("name", FILTERED)
def test_any_method_retires_prompts_by_weighted_rewards(name):
    rewards, weights = torch.stack([TOTAL, torch.zeros_like(TOTAL)]) / 2, torch.tensor([2.0, 1.0])
    assert build(name, FilterConfig(retire=True)).retired(rewards, weights).tolist() == [False, False, True, False]
    assert not build(name, FilterConfig()).retired(rewards, weights).any()
    assert not build(name).retired(rewards, weights).any()


def test_a_group_of_one_has_no_spread():
    build("ddpo").config.check_group(1)
    with pytest.raises(OptionError, match="filter compares"):
        build("ddpo", FilterConfig()).config.check_group(1)


def test_a_critic_has_no_groups_to_filter():
    module = registry.load("algorithms", "find")
    with pytest.raises(OptionError, match="filter is of baseline=group"):
        module.Config(filter=FilterConfig())
