"""`flowrl new`: every starting file runs as it is written."""

from __future__ import annotations

import json

import pytest

import flowrl
from flowrl.commands.new import command, write
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.run.trainer import Trainer

FEW = ("iterations=1", "rollout.prompts_per_iteration=2", "rollout.group_size=4", "data.max_eval_prompts=2")


def trained(config: str, *words: str) -> str:
    resolved = resolve(load_config(config, [*FEW, "optim.updates_per_iteration=1", *words]))
    Trainer(resolved).fit()
    return json.loads((resolved.run.folder / "summary.json").read_text())["status"]


def test_nothing_is_overwritten_and_names_are_those_of_modules(tmp_path, capsys):
    command("reward", "mine", tmp_path / "new")
    assert "flowrl score --check" in capsys.readouterr().out
    (tmp_path / "new" / "mine.py").write_text("kept")
    with pytest.raises(ConfigError, match=r"mine\.py is there already"):
        command("method", "mine", tmp_path / "new")
    assert (tmp_path / "new" / "mine.py").read_text() == "kept"
    for name in ("mine.py", "my-reward", "../x", "", "types"):
        with pytest.raises(ConfigError, match="NAME="):
            write("sampler", name, tmp_path)


@pytest.mark.parametrize("kind", ["reward", "sampler", pytest.param("method", marks=pytest.mark.slow)])
def test_a_component_keeps_every_law_of_its_kind(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(kind, "my_own", tmp_path)
    assert all(finding.good for finding in flowrl.check(str(tmp_path / "my_own.py")))
    with pytest.raises(ConfigError, match="unknown key"):
        flowrl.check(str(tmp_path / "my_own.py"), wieght=1.0)


@pytest.mark.parametrize(
    ("kind", "name"), [("sampler", "config"), ("sampler", "step_distribution"), ("method", "none")]
)
def test_a_name_that_the_file_needs_itself_gives_another_class(kind, name, tmp_path):
    write(kind, name, tmp_path)
    text = (tmp_path / f"{name}.py").read_text(encoding="utf-8")
    assert f"class My{name.title().replace('_', '')}(flowrl." in text
    compile(text, name, "exec")


@pytest.mark.slow
def test_the_reward_and_the_configuration_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, name in (("reward", "mine"), ("config", "first")):
        write(kind, name, tmp_path)
    assert trained("first.yaml") == "finished"
    assert trained("first.yaml", "name=second", "rewards=[{path: mine.py, target: 0.3}]") == "finished"


def test_the_configuration_is_valid(tmp_path):
    write("config", "first", tmp_path)
    run = resolve(load_config(tmp_path / "first.yaml"))
    assert (run.run.name, run.algorithm.name) == ("first", "flow_grpo")
