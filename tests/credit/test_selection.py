"""Which samples of a group are trained, and that the learner obeys."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.dance_grpo import SeparateConfig
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.credit.selection import SelectConfig, best_and_worst, most_varied
from tests import toys

NAN = float("nan")
ONE = torch.ones(1)


def everyone(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scores, dtype=torch.bool)


def test_best_of_n_keeps_the_best_and_the_worst_half_and_no_advantage_changes():
    r = torch.rand(1, 6, 12, generator=torch.Generator().manual_seed(0))
    plain = advantages(r, ONE, AdvantageConfig(std="group"))
    found = advantages(r, ONE, AdvantageConfig(std="group", select=SelectConfig(keep=4)))
    assert torch.equal(found.values, plain.values)
    order = r[0].argsort(dim=1)
    for p in range(6):
        assert set(found.kept[p].nonzero().flatten().tolist()) == {*order[p, :2].tolist(), *order[p, -2:].tolist()}


def test_with_separate_rewards_the_weighted_sum_of_advantages_ranks():
    """Score = vq_coef A_vq + mq_coef A_mq, both normalised over all samples."""
    r = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.5, 2.0])
    config = SeparateConfig(name="separate", std="group", select=SelectConfig(keep=2))
    found = advantages(r, weights, config)
    z = (r - r.mean(dim=2, keepdim=True)) / r.std(dim=2, keepdim=True)
    score = 0.5 * z[0] + 2 * z[1]
    assert found.values.shape == (3, 8, 2)
    for p in range(3):
        assert found.kept[p].nonzero().flatten().tolist() == sorted([int(score[p].argmin()), int(score[p].argmax())])


@pytest.mark.parametrize("name", ["best_worst", "variance"])
def test_neither_masked_samples_nor_dead_groups_nor_the_median_are_selected(name):
    r = torch.tensor([[[NAN, 9.0, 1.0, NAN, 3.0, 2.0], [5.0] * 6, [0.0, 1.0, NAN, NAN, NAN, NAN]]])
    plain = advantages(r, ONE, AdvantageConfig(select=SelectConfig(name=name, keep=2)))
    assert plain.kept.int().tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6, [1, 1, 0, 0, 0, 0]]
    # Where fewer are left than asked for, all of them are.
    more = advantages(r, ONE, AdvantageConfig(select=SelectConfig(name=name, keep=6)))
    assert more.kept.int().tolist() == [[0, 1, 1, 0, 1, 1], [0] * 6, [1, 1, 0, 0, 0, 0]]
    middle = advantages(r, ONE, AdvantageConfig(name="median", select=SelectConfig(name=name, keep=6)))
    assert middle.kept.int().tolist() == [[0, 1, 1, 0, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.integers(-20, 20), min_size=2, max_size=8), data=st.data())
def test_no_other_choice_varies_more(scores, data):
    keep = data.draw(st.integers(2, len(scores)))
    row = torch.tensor([scores], dtype=torch.float64)
    chosen = most_varied(row, everyone(row), keep)
    assert int(chosen.sum()) == keep
    best = max(row[0, list(c)].var(correction=0) for c in itertools.combinations(range(len(scores)), keep))
    assert float(row[chosen].var(correction=0)) == pytest.approx(float(best))


def test_the_most_varied_choice_need_not_be_balanced():
    row = torch.tensor([[0.0, 0.1, 0.2, 0.3, 9.0, 9.1]])
    assert best_and_worst(row, everyone(row), 4).int().tolist() == [[1, 1, 0, 0, 1, 1]]
    skewed = torch.tensor([[0.0, 8.0, 8.9, 9.0, 9.0, 9.1]])
    assert most_varied(skewed, everyone(skewed), 2).int().tolist() == [[1, 0, 0, 0, 0, 1]]
    lonely = torch.tensor([[0.0, 0.1, 0.2, 9.0]])
    assert most_varied(lonely, everyone(lonely), 3).int().tolist() == [[1, 1, 0, 1]]


def test_more_than_the_group_or_an_odd_number_is_refused_with_the_choices():
    r = torch.rand(1, 2, 6)
    with pytest.raises(ValueError, match=r"select.keep=8 is more than the 6 samples of a prompt; use one of 2, 4, 6$"):
        advantages(r, ONE, AdvantageConfig(select=SelectConfig(keep=8)))
    with pytest.raises(ValueError, match=r"use one of 2, 3, 4, 5, 6$"):
        advantages(r, ONE, AdvantageConfig(select=SelectConfig(name="variance", keep=7)))
    with pytest.raises(ValueError, match="try keep=2, or keep=4, or name=variance"):
        SelectConfig(keep=3)
    with pytest.raises(ValueError, match="keep=3 must be even"):
        best_and_worst(r[0], everyone(r[0]), 3)


def test_only_kept_samples_reach_an_update_each_with_its_own_columns():
    session = toys.roll_out(toys.ToyAdapter(), prompts=2, group=4)
    r = torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(0))
    config = SeparateConfig(name="separate", std="group", select=SelectConfig(keep=2))
    credit = advantages(r, torch.ones(2), config)
    replay = toys.replay_of(session, r, credit, batch_size=3)
    trained = torch.cat(replay.shares)
    assert sorted(set(session.edges.sample[trained].tolist())) == credit.kept.flatten().nonzero().flatten().tolist()
    assert len(trained) == 4 * len(session.plan.train) == sum(replay.sizes)
    for number, share in enumerate(replay.shares):
        for batch, _ in replay.batches(number):
            sample = session.edges.sample[share[batch.place]]
            assert torch.equal(batch.advantage, credit.values.flatten(0, 1)[sample])
