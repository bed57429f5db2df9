"""`flowrl new`: every starting file runs as it is written."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import flowrl
from flowrl.commands.new import command, write
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.core.strict import overridden
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
    with pytest.raises(ConfigError, match="--short writes a reward as one function, and KIND=method"):
        write("method", "other", tmp_path, short=True)


def test_a_short_reward_is_one_function_that_keeps_every_law(tmp_path):
    assert "flowrl score --check" in write("reward", "bright", tmp_path, short=True)
    text = (tmp_path / "bright.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 10
    assert "def score(" in text
    assert all(finding.good for finding in flowrl.check(str(tmp_path / "bright.py")))


@pytest.mark.parametrize("kind", ["reward", "sampler", "suite", pytest.param("method", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("folder", ["plain", "of Mia, \u00fc: #1 $x {a}'s"])
def test_the_commands_that_try_a_file_reach_it_wherever_it_lies(folder, tmp_path):
    for kind, key in (("reward", "rewards"), ("method", "algorithm"), ("sampler", "rollout")):
        printed = write(kind, "mine", tmp_path / folder / kind).splitlines()[1:]
        file = str(tmp_path / folder / kind / "mine.py")
        inside = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.startswith("    flowrl")]
        for line in (*printed, *inside):
            *_, last = shlex.split(line, comments=True)
            if "score --check" in line:
                assert shlex.split(line, comments=True)[3] == file
                continue
            found = overridden({}, [last])[key]
            found = found[0] if kind == "reward" else found.get("sampler", found)
            assert found == {"path": file}
        if kind != "reward":
            (check,) = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if "python -c" in line]
            (call,) = re.findall(r"flowrl.check\((.*)\), sep=", shlex.split(check)[2])
            assert ast.literal_eval(call) == file


@pytest.mark.slow
def test_the_reward_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("reward", "mine", tmp_path)
    assert trained("lab/flow_grpo", "name=second", "rewards=[{path: mine.py, target: 0.3}]") == "finished"


def test_options_of_a_recipe_are_for_a_recipe(tmp_path):
    with pytest.raises(ConfigError, match="KIND=reward: the options of a recipe are for KIND=config"):
        command("reward", "mine", tmp_path, hours=3.0)
    assert not (tmp_path / "mine.py").exists()
