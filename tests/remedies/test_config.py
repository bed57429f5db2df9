"""Remedies of a configuration that is read and checked, with the model's pipeline but without its weights."""

from __future__ import annotations

import shlex

import pytest

from flowrl.core.errors import Fault
from tests.remedies import follows
from tests.remedies.following import follow_settings, loaded, numbered, provoked, recipe
from tests.tables import table

CASES = table(__file__, "faults_of_configurations")


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
    follow_settings(lambda tree, words: loaded(tmp_path, tree, words, deep=True), tree, given, fault)
