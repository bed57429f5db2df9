"""Remedies of a configuration that is read and checked, with the model's pipeline but without its weights."""

from __future__ import annotations

import shlex

import pytest

from flowrl.core.errors import Fault
from tests.remedies import follows
from tests.remedies.following import follow_settings, loaded, numbered, provoked, recipe

VOTES = "rewards=[{name: votes},{name: jpeg}]"
CASES = [
    # place, recipe of configs/lab, words that provoke the fault
    ("config/checks.py:_check_optimizer 1 2 3", "flow_grpo", "optim.name=adafactor model.shard=true"),
    ("config/checks.py:_check_optimizer 4", "find", "optim.name=adafactor"),
    ("config/checks.py:_check_source 1", "flow_grpo", "rewards=[]"),
    ("config/checks.py:_check_source 2", "flow_grpo", "rewards.0.weight=0"),
    ("config/checks.py:_check_source 3", "diffusion_dpo", "'rewards=[{name: jpeg}]'"),
    ("config/checks.py:_check_source 4", "diffusion_dpo", "eval.rewards=[] eval.best_guidance=[1.0]"),
    ("config/checks.py:_check_source 5", "diffusion_dpo", "data.eval_prompts=null"),
    ("config/checks.py:_check_people 1", "flow_grpo", "'eval.rewards=[{name: votes}]'"),
    ("config/checks.py:_check_people 2 3", "awm", f"'{VOTES}' rollout.exploration.pool=64"),
    ("config/checks.py:_check_people 4", "ddpo", f"'{VOTES}' rollout.group_size=1"),
    ("config/checks.py:_check_people 5", "flow_grpo", "'rewards=[{name: votes}]' eval.best_guidance=[1.0]"),
    ("config/components.py:component 1 2", "flow_grpo", "algorithm.path=mine.py"),
    ("config/schema.py:geometry", "flow_grpo", "optim.updates_per_iteration=3"),
    ("config/trackers.py:entries", "flow_grpo", "'trackers=[tensorboard,tensorboard]'"),
    ("config/watched.py:require_watched", "flow_grpo", "guard.mode=warn 'rewards=[{name: jpeg}]' eval.every=5"),
    ("config/watched.py:check_guard 1 2", "flow_grpo", "guard.mode=warn 'eval.rewards=[{name: jpeg}]'"),
    ("config/watched.py:check_guard 3", "diffusion_dpo", "guard.mode=warn eval.every=5 data.eval_prompts=null eval.rewards=[]"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "name", "words"), CASES, ids=[case[0] for case in CASES])
@follows(*(place for case in CASES for place in numbered(case[0])))
def test_a_configuration_is_valid_with_each_remedy(place, name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from flowrl.algorithms.flow_grpo import LEVEL, Config, build\n")
    tree, given = recipe(name), shlex.split(words)
    try:  # the shallow check comes first, and takes a tenth of the time
        loaded(tmp_path, tree, given)
        deep = True
    except Fault:
        deep = False
    fault = provoked(lambda: loaded(tmp_path, tree, given, deep=deep), numbered(place))
    follow_settings(lambda tree, words: loaded(tmp_path, tree, words, deep=deep), tree, given, fault)
