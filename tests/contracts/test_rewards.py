"""What every file in rewards/ must satisfy; a new file is tested before its author writes a test."""

from __future__ import annotations

import dataclasses
import math

import pytest

from flowrl.contracts.rewards import Trials, material
from flowrl.core import registry
from flowrl.reward import Card, RewardError
from flowrl.scoring.entries import RewardEntry

NAMES = registry.names("rewards")
LIGHT = ("degeneracy", "diversity", "jpeg", "motion", "shapes")
"""Rewards without weights: their contract is tried as it is. The others have tests with tiny networks."""


@pytest.fixture(params=NAMES)
def module(request):
    return registry.load("rewards", request.param)


def test_the_card_is_filled(module):
    card = module.CARD
    assert isinstance(card, Card)
    assert card.outputs
    assert len(set(card.outputs)) == len(card.outputs)
    assert card.low < card.high
    assert card.modality in ("image", "video", "any", "edit")
    for name in ("resolution", "licence", "source", "version"):
        assert getattr(card, name) not in ("", "unknown"), name
    assert card.licence != "unknown"
    assert card.level == module.LEVEL
    assert all(math.isfinite(value) for value in card.transform)
    assert card.transform[0] > 0, "the direction is higher_is_better's to say"
    assert 0 <= card.memory_gib < 200


def test_the_options_do_not_hide_behind_those_of_every_entry(module):
    own = {item.name for item in dataclasses.fields(module.Config)}
    assert own & {item.name for item in dataclasses.fields(RewardEntry)} == set()
    assert module.__doc__.strip().splitlines()[0].endswith(".") or "?" in module.__doc__.strip().splitlines()[0]


def test_what_is_declared_for_the_default_options_is_the_card(module):
    if not hasattr(module, "card_of"):
        return
    required = {"remote": {"servers": ["http://127.0.0.1:1"], "reward": "a"}}
    name = module.__name__.rpartition(".")[2]
    declared = module.card_of(module.Config(**required.get(name, {})))
    assert declared == (None if name == "remote" else module.CARD), "only the servers know what they serve"


def test_no_two_rewards_share_an_output():
    outputs = [name for each in NAMES for name in registry.load("rewards", each).CARD.outputs]
    assert len(outputs) == len(set(outputs))


@pytest.mark.parametrize("name", LIGHT)
def test_a_reward_without_weights_keeps_the_contract(name):
    module = registry.load("rewards", name)
    reward = module.build(module.Config())
    assert reward.card == module.CARD
    findings = list(Trials(name, reward, material(reward.card)).run())
    assert len(findings) > 10
    assert [f for f in findings if not f.good] == []


def test_shapes_refuses_a_caption_in_words():
    module = registry.load("rewards", "shapes")
    samples = material(module.CARD)
    with pytest.raises(RewardError, match="shapes"):
        module.build(module.Config()).score(samples.images[:1], ["no caption of this world"], [{}])
