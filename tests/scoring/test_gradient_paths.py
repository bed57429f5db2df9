"""Rewards that a method on gradients cannot climb, by the way it is lost; hinges that end all gradients, or none."""

from pathlib import Path

import pytest
from flowrl.rewards._remote import client, options

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.core.wire import plain_card
from flowrl.reward import Card
from flowrl.scoring.gradient import require_paths
from tests.tiny_sd3 import ROOT
from tests.training.test_gradient_batches import service

CLIMBED = "{name: clip_score, model: tiny-clip, preprocess: fast}"
DRAFT = ROOT / "configs" / "lab" / "draft.yaml"


def test_a_reward_on_a_server_has_no_gradient_whatever_its_card_says_there():
    """Its card comes with the server's first answer, so that the configuration alone passes."""
    config = options.Config(servers=["http://127.0.0.1:9"], reward="there")
    here = client._card(plain_card(Card(outputs=("there",), differentiable=True)), config)
    assert not here.differentiable
    remote = "{name: remote, servers: ['http://127.0.0.1:9'], reward: there}"
    plans = resolve(load_config(DRAFT, [f"rewards=[{CLIMBED}, {remote}]"])).rewards
    climbed = plans[0].card
    with pytest.raises(ConfigError, match=r"rewards.1: draft climbs .* 'remote' has none: its card does not declare"):
        require_paths("draft", plans, [climbed, here])
    looked_at = resolve(load_config(DRAFT, [f"rewards=[{CLIMBED}, {remote[:-1]}, weight: 0}}]"])).rewards
    require_paths("draft", looked_at, [climbed, here])


def test_a_function_without_a_card_is_named_with_what_its_card_lacks(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n")
    with pytest.raises(ConfigError, match=r"rewards.1: draft climbs .* 'mine' has none: .*\(differentiable\)"):
        resolve(load_config(DRAFT, [f"rewards=[{CLIMBED}, {{path: {tmp_path / 'mine.py'}}}]"]))


def said(hinge: float | None, shares: list[float], value: float = 0.5) -> dict[int, str]:
    """Warnings of the rows of consecutive iterations, by the iteration from 1."""
    gradient = service(hinge=hinge)
    rows = [{"reward_gradient/flat_share": share, "reward_gradient/value": value} for share in shares]
    told = {k: gradient.warning(row) for k, row in enumerate(rows, 1)}
    return {k: text for k, text in told.items() if text is not None}


def test_a_hinge_that_ends_every_gradient_is_said_ever_less_often_and_anew_after_one():
    found = said(0.4, [1.0] * 9)
    assert sorted(found) == [1, 2, 4, 8]
    assert "this iteration, so that nothing is learned: the reward, 0.5 on average, is above" in found[1]
    assert "8 iterations in a row" in found[8]
    assert "algorithm.hinge=0.4; raise that" in found[8]
    assert sorted(said(0.4, [1.0, 0.5, 1.0])) == [1, 3]
    (other,) = said(None, [1.0]).values()
    assert "hinge" not in other
    assert "saturated pixels or failures" in other


def test_a_hinge_that_ends_no_gradient_is_said_once():
    found = said(0.9, [0.0] * 80)
    assert list(found) == [32]
    assert "algorithm.hinge=0.9 has ended no gradient in 32 iterations: the reward is 0.5 now" in found[32]
    assert said(0.9, [*[0.0] * 31, 0.1, *[0.0] * 31]) == {}
    assert said(None, [0.0] * 80) == {}
    assert service(hinge=0.9).warning({"grad/norm": 1.0}) is None
