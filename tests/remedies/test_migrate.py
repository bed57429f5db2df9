"""The remedies of `flowrl convert-config`."""

import shlex
from typing import Any

import pytest

from flowrl.apps.migration.tools import tool_of
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from tests.remedies import follows
from tests.remedies.following import command_fault


@follows("flowrl/apps/migration/tools.py:tool_of")
def test_the_configuration_of_a_tool_that_is_not_converted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="kohya's scripts, are not converted") as caught:
        tool_of("config.toml", None)
    (remedy,) = caught.value.remedies
    words: list[Any] = shlex.split(remedy.command)
    assert words[:2] == ["flowrl", "new"]
    command_fault(words[1:])
    assert resolve(load_config("mine.yaml")).algorithm.name == "flow_grpo"
