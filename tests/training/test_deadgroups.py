"""A run that learns nothing warns, with the cause that its rewards show, and ever less often."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.reward import Card, Reward
from flowrl.scoring.options import Gate
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.dead_groups import DeadGroups

NAN = float("nan")
NO_SCORE: Any = None  # the score function: the raw values are given


def entry(name="mine", **options: Any) -> WeightedReward:
    return WeightedReward(name, Reward(NO_SCORE, Card(outputs=(name,), low=0.0, high=1.0)), **options)


def look(raw, *entries: WeightedReward, image_std: float = 0.1, watcher: DeadGroups | None = None) -> str | None:
    """The warning of raw values [P, G], the same for every entry."""
    entries = entries or (entry(),)
    table = torch.tensor(raw)
    outputs = {each.name: table for each in entries}
    rewards = torch.stack(
        [e.training_value({k: v.flatten() for k, v in outputs.items()}).view_as(table) for e in entries]
    )
    weights = torch.tensor([e.weight for e in entries])
    credit = advantages(rewards, weights, AdvantageConfig(name="group" if table.shape[1] > 1 else "batch"))
    rollout: Any = SimpleNamespace(rewards=rewards, raw=outputs, image_std=image_std)
    return (watcher or DeadGroups(entries)).warning(rollout, credit)


def warning(raw, *entries: WeightedReward, **options: Any) -> str:
    """The warning that there has to be."""
    text = look(raw, *entries, **options)
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], "all 2 groups .* 'mine' seems constant, with 0.5 for every sample"),
        ([[0.5, 0.5], [0.2, 0.2]], "'mine' gives all samples of a prompt one value: it uses the prompt alone"),
        ([[1.0, 1.0], [1.0, 1.0]], "'mine' is saturated, with 1, an end of its range"),
        ([[1.0, 1.0], [0.0, 0.0]], "'mine' is saturated, with 0 or 1"),
        ([[0.3], [0.3]], "'mine' seems constant, with 0.3"),
        ([[0.3]], "one sample alone .* raise rollout.group_size"),
        ([[0.3, NAN], [NAN, 0.1]], "no prompt has two samples with a score"),
        ([[NAN, NAN]], "the only group .* no sample has a score"),
    ],
)
def test_what_is_wrong_is_named(raw, words):
    assert re.search(words, warning(raw))


def test_pictures_that_are_alike_and_a_clip_that_flattens_are_not_the_rewards_fault():
    assert "all samples of a prompt are the same" in warning([[0.5, 0.5], [0.2, 0.2]], image_std=0.0)
    flat = warning([[0.5, 0.6], [0.7, 0.8]], entry(clip=(0.0, 0.4)))
    assert "differs between samples, and its clip or gate makes one training value" in flat
    shut = warning([[0.5, 0.6], [0.7, 0.8]], entry(gate=Gate(output="mine", at_least=0.9)))
    assert "clip or gate" in shut
    assert "the other rewards cancel that" in warning([[0.25, 0.5]], entry("a"), entry("b", weight=-1.0))


@pytest.mark.parametrize(
    ("size", "std", "scale"),
    [(1e-6, None, ""), (1e-9, "5e-10", "1e+09"), (1e-30, "5e-31", "1e+30"), (1e-40, "5e-41", "1e+30")],
)
def test_rewards_of_a_small_scale_are_named_with_the_factor_that_mends_it(size, std, scale):
    """Two scores 0 and s have the std s / 2, and advantages of (s / 2) / (s / 2 + 1e-4)."""
    table = [[0.0, size], [size, 0.0]]
    if std is None:
        assert look(table) is None, "5e-3, as of scores that differ by rounding at 20"
        return
    text = warning(table)
    assert f"'mine' differs by {std} (rewards.0.scale={scale} makes that 1)" in text
    assert f"advantages of this iteration are {size / 2 / 1e-4:.2g} or less" in text
    assert "not the learning rate" in text
    assert look(table, entry(scale=float(scale))) is None or size < 1e-30, "following it"
    watcher = DeadGroups([entry()])
    assert [number for number in range(1, 9) if look(table, watcher=watcher)] == [1, 2, 4, 8]


def test_a_reward_that_is_only_looked_at_is_not_named():
    text = warning([[0.5, 0.5]], entry("a"), entry("b", weight=0.0))
    assert "'a'" in text
    assert "'b'" not in text


def test_it_is_told_ever_less_often_and_anew_after_a_good_iteration():
    watcher = DeadGroups([entry()])
    dead, live = [[0.5, 0.5]], [[0.5, 0.5], [0.2, 0.5]]
    warned = [number for number in range(1, 17) if look(dead, watcher=watcher)]
    assert warned == [1, 2, 4, 8, 16]
    assert look(live, watcher=watcher) is None
    assert "in a row" not in warning(dead, watcher=watcher)
    assert "for 2 iterations in a row" in warning(dead, watcher=watcher)


def test_with_a_virtual_best_only_groups_that_are_all_right_are_dead():
    rule = AdvantageConfig(std="group", virtual_best=1)
    for values, words in (([0.0, 0.0], None), ([1.0, 1.0], "'mine' is saturated, with 1, an end of its range")):
        table = torch.tensor([values])
        credit = advantages(table[None], torch.ones(1), rule, known=[torch.tensor(1.0)])
        rollout: Any = SimpleNamespace(rewards=table[None], raw={"mine": table}, image_std=0.1)
        text = DeadGroups([entry()]).warning(rollout, credit)
        assert text is None if words is None else text is not None and words in text
