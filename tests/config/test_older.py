"""Options that came later have the value that older runs were made with."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from flowrl.config import older
from flowrl.config.older import Added, Changed, Place, as_it_was
from flowrl.core.errors import ConfigError
from tests.e2e.conftest import place as place
from tests.e2e.conftest import train


def test_an_option_that_came_later_has_the_value_that_older_runs_were_made_with():
    tree = {"data": {"prompts": "a"}, "model": {"name": "wan", "memory": {}}, "rollout": None}
    then = as_it_was(tree)
    assert then["data"] == {"prompts": "a", "eval_share": 0.0}
    assert then["model"]["fps"] == 16.0
    assert then["model"]["memory"] == {"vae_channels_last": False}
    assert tree["data"] == {"prompts": "a"}, "the caller's tree is not changed"
    assert as_it_was({"data": {"eval_share": 0.3}})["data"]["eval_share"] == 0.3
    assert "fps" not in as_it_was({"model": {"name": "sd3"}})["model"]


KL = Changed(
    Place("algorithms", "*", "kl.divisor"),
    *(None, "flow_grpo", Place("run", "*", "eval.tie")),
    where=lambda tree: tree["rollout"]["sampler"]["name"] == "cps",
)


@pytest.mark.parametrize(
    ("sampler", "newer", "then"), [("cps", {}, "flow_grpo"), ("cps", {"tie": 0.1}, None), ("x", {}, None)]
)
def test_a_value_with_a_new_meaning_keeps_the_old_one_in_the_files_that_lack_an_option_that_came_with_it(
    sampler, newer, then, monkeypatch
):
    monkeypatch.setattr(older, "CHANGED", (KL,))
    monkeypatch.setattr(older, "ADDED", (Added(Place("run", "*", "eval.tie"), 0.0),))
    tree = {
        "rollout": {"sampler": {"name": sampler}},
        "algorithm": {"name": "a", "kl": {"divisor": None}},
        "eval": newer,
    }
    assert as_it_was(tree)["algorithm"]["kl"] == {"divisor": then}
    assert as_it_was(tree)["eval"] == ({"tie": 0.0} | newer)


def test_a_resumed_older_run_keeps_its_value_or_is_refused_by_key(place, monkeypatch):
    """The run is older: its file lacks `optim.ema.repeats`, and its schedule is told by a word with a new meaning."""
    small = ("rollout.num_inference_steps=2", "optim.updates_per_iteration=1", "data.max_eval_prompts=1")
    train("iterations=1", *small)
    file = Path("runs/run/config.yaml")
    tree = yaml.safe_load(file.read_text())
    del tree["optim"]["ema"]["repeats"]
    file.write_text(yaml.safe_dump(tree))
    (change,) = changes = (
        Changed(Place("run", "*", "optim.schedule"), "constant", "linear", Place("run", "*", "optim.ema.repeats")),
    )
    monkeypatch.setattr(older, "CHANGED", changes)
    with pytest.raises(ConfigError, match=r"optim\.schedule was 'linear', now 'constant'"):
        train("iterations=1", *small, resume=True)
    before = copy.deepcopy(yaml.safe_load(file.read_text()))
    train("iterations=1", *small, f"optim.schedule={change.kept}", resume=True)
    after = yaml.safe_load(file.read_text())
    assert after["optim"] == before["optim"] | {"schedule": "linear", "ema": before["optim"]["ema"] | {"repeats": 1}}
