"""Options of earlier versions: a run folder is read with them, a user's configuration is told the new names."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config import retired
from flowrl.config.retired import Place, Renamed, Retired, as_it_was, refuse_old_names
from flowrl.core.errors import ConfigError

FILE = Path("runs/one/config.yaml")


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """A table of three changes beside the real additions."""
    gone = Retired(Place("algorithms", "ddpo", "clip.low"), 0.1, "set clip.range")
    everywhere = Retired(Place("rewards", "*", "mood"), None)
    monkeypatch.setattr(retired, "RETIRED", (gone, everywhere))
    monkeypatch.setattr(
        retired,
        "RENAMED",
        (
            Renamed(Place("run", "*", "data.set"), "data.set.path"),
            Renamed(Place("run", "*", "data.set_size"), "data.set.size"),
        ),
    )


def test_an_option_that_is_gone_is_dropped_at_its_default_and_another_tree_is_left_as_it_is():
    tree = {"algorithm": {"name": "ddpo", "clip": {"low": 0.1, "high": 2}}, "rewards": [{"name": "a", "mood": None}]}
    assert as_it_was(tree, FILE) == {"algorithm": {"name": "ddpo", "clip": {"high": 2}}, "rewards": [{"name": "a"}]}
    assert tree["algorithm"]["clip"]["low"] == 0.1, "the caller's tree is not changed"
    other = {"algorithm": {"name": "dpok", "clip": {"low": 3}}}
    assert as_it_was(other, FILE) == other


def test_an_option_that_is_gone_and_was_set_names_the_version_that_reads_the_run():
    with pytest.raises(ConfigError, match=r"runs/one/config\.yaml: algorithm\.clip\.low=0\.2: .* at commit 8210558"):
        as_it_was({"algorithm": {"name": "ddpo", "clip": {"low": 0.2}}}, FILE)
    with pytest.raises(ConfigError, match=r"eval\.rewards\.1\.mood='glad'"):
        as_it_was({"eval": {"rewards": [{}, {"mood": "glad"}]}}, FILE)


def test_a_renamed_option_keeps_its_value_in_a_run_folder():
    found = as_it_was({"data": {"set": "a", "set_size": 3, "eval_share": 0.2}}, FILE)
    assert found == {"data": {"set": {"path": "a", "size": 3}, "eval_share": 0.2}}
    unused = as_it_was({"data": {"set": None, "set_size": 3, "eval_share": 0.2}}, FILE)
    assert unused == {"data": {"set": None, "eval_share": 0.2}}
    assert as_it_was(found, FILE) == found, "today's options stay"


def test_an_option_that_came_later_has_the_value_that_older_runs_were_made_with():
    assert as_it_was({"data": {"prompts": "a"}}, FILE)["data"]["eval_share"] == 0.0
    assert as_it_was({"data": {"eval_share": 0.3}}, FILE)["data"]["eval_share"] == 0.3


def test_a_users_configuration_is_told_every_new_name_at_once():
    with pytest.raises(ConfigError) as caught:
        refuse_old_names({"data": {"set": "a", "set_size": 3}, "algorithm": {"name": "ddpo", "clip": {"low": 0.1}}})
    assert str(caught.value).splitlines() == [
        "data.set='a': this option is data.set.path now",
        "data.set_size=3: this option is data.set.size now",
        "algorithm.clip.low=0.1: there is no such option any more; set clip.range",
    ]
    refuse_old_names({"data": {"set": {"path": "a"}}, "rewards": [{"mood": "glad"}], "rollout": "nonsense"})
    refuse_old_names({"data": {"set": None}, "algorithm": None})
