"""Kept answers of `flowrl plan`: the same text without torch, and none that is stale."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowrl
from flowrl.commands import _plan_cache as kept
from flowrl.commands.plan import command


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch sets it where it is not


def test_a_kept_answer_is_printed_before_torch_is_imported():
    code = (
        "import sys; from flowrl.commands import _plan_cache as kept; from flowrl.commands.plan import command\n"
        "kept.keep(kept.question(['quickstart', 'seed=3']), 'as measured', set())\n"
        "command('quickstart', ['seed=3']); print([m for m in ('torch', 'diffusers', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "as measured[]\n", done.stderr
    assert "--fresh measures anew" in done.stderr


def test_the_plan_is_the_same_from_what_is_kept_as_measured(capsys, monkeypatch):
    command("quickstart")
    measured = capsys.readouterr()
    asked = kept.question(["quickstart"])
    assert kept.find(asked) == measured.out
    command("quickstart")
    again = capsys.readouterr()
    assert (again.out, measured.err) == (measured.out, "")
    assert "measured before" in again.err
    monkeypatch.setattr("flowrl.commands.plan._skeleton", lambda resolved: (None, "not measured here"))
    command("quickstart", fresh=True)
    assert "not measured here" in capsys.readouterr().out, "--fresh asks the model again"


def answered(asked: dict, *paths: Path) -> None:
    kept.keep(asked, "text", {str(path) for path in paths})
    assert kept.find(asked) == "text"


@pytest.mark.parametrize("change", ["content", "new", "gone", "inside", "listed"])
def test_a_file_or_folder_that_changed_is_not_answered_from_before(change, tmp_path):
    file, absent, folder = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "model"
    (folder / "unet").mkdir(parents=True)
    file.write_text("one\n", encoding="ascii")
    asked = kept.question(["recipe.yaml"])
    kept.keep(asked, "text", {str(file), str(absent), str(folder), f"{tmp_path}/model/"})
    assert kept.find(asked) == "text"
    if change == "content":
        file.write_text("two lines\n", encoding="ascii")
    elif change == "new":
        absent.write_text("", encoding="ascii")
    elif change == "gone":
        file.unlink()
    elif change == "inside":
        (folder / "unet" / "config.json").write_text("{}", encoding="ascii")
    else:
        (folder / "vae").mkdir()
    assert kept.find(asked) is None


def test_what_changes_while_it_is_measured_is_not_kept(tmp_path):
    file, asked = tmp_path / "recipe.yaml", kept.question(["recipe.yaml"])
    file.write_text("seed: 0", encoding="ascii")
    changed = file.stat().st_mtime_ns
    kept.keep(asked, "text", {str(file)}, since=changed)
    assert kept.find(asked) is None, "it may have been read before the change"
    kept.keep(asked, "text", {str(file)}, since=changed + 10**9)
    assert kept.find(asked) == "text"


def test_a_file_of_a_model_that_changes_while_it_is_measured_keeps_nothing(tmp_path):
    weights, asked = tmp_path / "model" / "unet" / "config.json", kept.question(["recipe.yaml"])
    weights.parent.mkdir(parents=True)
    weights.write_text("{}", encoding="ascii")
    before = weights.parent.stat().st_mtime_ns
    time.sleep(0.05)
    weights.write_text('{"a": 1}', encoding="ascii")
    changed = weights.stat().st_mtime_ns
    assert weights.parent.stat().st_mtime_ns == before, "the folder itself does not tell"
    kept.keep(asked, "text", {str(tmp_path / "model")}, since=changed)
    assert kept.find(asked) is None
    kept.keep(asked, "text", {str(tmp_path / "model")}, since=changed + 10**9)
    assert kept.find(asked) == "text"


def test_no_secret_of_the_environment_is_written(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    answered(kept.question(["recipe.yaml"]))
    (file,) = kept.folder().iterdir()
    assert "hf_secret" not in file.read_text(encoding="utf-8")
    assert kept.folder().stat().st_mode & 0o077 == 0, "of its user alone"
    monkeypatch.setenv("HF_TOKEN", "another")
    assert kept.find(kept.question(["recipe.yaml"])) is None


def test_another_version_other_words_other_environment_or_other_code_are_other_questions(tmp_path, monkeypatch):
    asked = kept.question(["recipe.yaml"])
    answered(asked)
    assert kept.find(kept.question(["recipe.yaml", "seed=1"])) is None
    with monkeypatch.context() as patch:
        patch.setattr(kept, "versions", lambda: {"torch": "9.9.9"})
        assert kept.find(kept.question(["recipe.yaml"])) is None, "another torch"
    with monkeypatch.context() as patch:
        (tmp_path / "torchao-9.9.dist-info").mkdir()
        patch.syspath_prepend(str(tmp_path))
        assert kept.find(kept.question(["recipe.yaml"])) is None, "another package"
    with monkeypatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path))
        assert kept.find(kept.question(["recipe.yaml"])) is None
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert kept.find(kept.question(["recipe.yaml"])) is None
    assert kept.find(kept.question(["recipe.yaml"])) == "text"
    (tmp_path / "flowrl").mkdir()
    source = tmp_path / "flowrl" / "__init__.py"
    source.write_text("x = 1\n", encoding="ascii")
    monkeypatch.setattr(flowrl, "__file__", str(source))
    before = kept.question(["recipe.yaml"])
    source.write_text("x = 2\n", encoding="ascii")
    assert kept.question(["recipe.yaml"])["code"] not in (before["code"], asked["code"])


def test_what_a_configuration_names_and_what_is_read_is_watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"path": "owner/model"}, "data": {"prompts": "shards/*.jsonl"}, "rewards": [{"path": "my.py"}]}
    places = set(kept.named(tree, "/hub"))
    assert {"/hub/models--owner--model", str(tmp_path / "shards"), str(tmp_path / "my.py")} <= places
    file = tmp_path / "read.txt"
    file.write_text("read", encoding="ascii")
    with kept.reading() as reads:
        file.read_text(encoding="ascii")
        json.loads(json.dumps({}))
        (tmp_path / "written.txt").write_text("written", encoding="ascii")
        Path(json.__file__).read_bytes()
    assert reads.paths == {str(file)}, "not what is written, nor the library"


def test_only_the_newest_answers_stay_and_a_damaged_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "KEPT", 2)
    for number in range(4):
        answered(kept.question([str(number)]))
    assert len(list(kept.folder().iterdir())) == 2
    asked = kept.question(["3"])
    for file in kept.folder().iterdir():
        file.write_text("{", encoding="ascii")
    assert kept.find(asked) is None
    monkeypatch.setattr(kept, "_FILES", 1)
    (tmp_path / "many").mkdir()
    for name in "ab":
        (tmp_path / "many" / name).touch()
    kept.keep(kept.question(["many"]), "text", {str(tmp_path / "many")})
    assert kept.find(kept.question(["many"])) is None, "too many files to look at each time"
