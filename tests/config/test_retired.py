"""Options that came later have the value that older runs were made with."""

from __future__ import annotations

from flowrl.config.retired import as_it_was


def test_an_option_that_came_later_has_the_value_that_older_runs_were_made_with():
    tree = {"data": {"prompts": "a"}, "model": {"name": "wan", "memory": {}}, "rollout": None}
    then = as_it_was(tree)
    assert then["data"] == {"prompts": "a", "eval_share": 0.0}
    assert then["model"]["fps"] == 16.0
    assert then["model"]["memory"] == {"vae_channels_last": False}
    assert tree["data"] == {"prompts": "a"}, "the caller's tree is not changed"
    assert as_it_was({"data": {"eval_share": 0.3}})["data"]["eval_share"] == 0.3
    assert "fps" not in as_it_was({"model": {"name": "sd3"}})["model"]
