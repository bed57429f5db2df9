"""Remedies of the rewards."""

from __future__ import annotations

import pytest

from flowrl.core.errors import ConfigError
from flowrl.scoring.entries import reward_plan
from tests.remedies import follows


@follows("flowrl/scoring/entries.py:_require_towards_better")
@pytest.mark.parametrize("option", ["weight", "scale"])
def test_a_factor_below_0_becomes_what_the_message_says(option):
    with pytest.raises(ConfigError) as refused:
        reward_plan({"name": "jpeg", option: -0.5}, "rewards.0")
    ((key, value),) = refused.value.remedies[0].settings.items()
    assert (key, value) == (f"rewards.0.{option}", 0.5)
    entry = reward_plan({"name": "jpeg", option: value}, "rewards.0").entry
    assert getattr(entry, option) == 0.5
