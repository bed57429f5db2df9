"""A run is worked with from any folder, and goes on where it was moved to."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.e2e.conftest import BASE, BRIGHTNESS, finish, start, train
from tests.e2e.test_bad_input import command
from tests.remedies import follows


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `conf/run.yaml`, its reward and its prompts; the working directory is elsewhere."""
    folder = tmp_path / "project/conf"
    folder.mkdir(parents=True)
    data = {"prompts": "train.txt", "eval_prompts": "held.txt", "max_eval_prompts": 2}
    tree = BASE | {"data": data, "iterations": 1, "model": BASE["model"] | {"lora": {"rank": 2, "alpha": 4}}}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    (folder / "brightness.py").write_text(BRIGHTNESS)
    (folder / "train.txt").write_text("a red circle\na blue square\na green cross\n")
    (folder / "held.txt").write_text("a red square\na blue circle\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_run_is_worked_with_from_any_folder_and_goes_on_where_it_was_moved_to(project, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, "train", "../project/conf/run.yaml")
    assert code == 0, printed
    shutil.move("runs/run", project / "moved")
    (project / "third").mkdir()
    monkeypatch.chdir(project / "third")
    run = "../moved"
    for words in (
        ("eval", run),
        ("gallery", run),
        ("export", run, "--out", "out"),
        ("sample", run, "a red circle", "--out", "drawn"),
    ):
        code, printed = command(monkeypatch, capsys, *words)
        assert code == 0, printed
    code, printed = command(monkeypatch, capsys, "train", run)
    assert code == 2
    assert "give --resume" in printed
    code, printed = command(monkeypatch, capsys, "train", run, "iterations=2", "--resume")
    assert code == 0, printed
    assert "resumed after iteration 1" in printed
    assert json.loads((project / "moved/summary.json").read_text())["iterations"] == 2
    assert not Path("runs").exists()


@pytest.mark.slow
def test_processes_go_on_in_a_renamed_run(project):
    code, printed = finish(start("train", "../project/conf/run.yaml", "--processes", "2"))
    assert code == 0, printed
    shutil.move("runs/run", "runs/other")
    code, printed = finish(start("train", "runs/other", "iterations=2", "--resume", "--processes", "2"))
    assert code == 0, printed
    assert "resumed after iteration 1" in printed
    assert sorted(entry.name for entry in Path("runs").iterdir()) == ["other"]


def evaluation(run: str, tag: str) -> dict:
    return json.loads(Path(f"runs/{run}/eval/{tag}.json").read_text())


@follows("flowrl/data/contents.py:require_same")
def test_an_edited_reward_is_refused_or_starts_new_baselines(place, monkeypatch, capsys):
    """A resumed run with another reward reported the difference between two rewards as what training had done."""
    train("iterations=1", "data.max_eval_prompts=2")
    words = ("run.yaml", "iterations=2", "data.max_eval_prompts=2")
    (place / "brightness.py").write_text(BRIGHTNESS.replace("return ", "return 290 + "))
    for refused in (("train", *words, "--resume"), ("eval", "runs/run")):
        code, printed = command(monkeypatch, capsys, *refused)
        assert code == 2, printed
        for word in ("brightness.py", "line 2", "return 290", "--accept-changes"):
            assert word in printed
    code, printed = command(monkeypatch, capsys, "eval", "runs/run", "--accept-changes")
    assert code == 0, printed
    assert (
        "no win rate by brightness: the run's base was made with other values of: the reward of brightness" in printed
    )
    code, printed = command(monkeypatch, capsys, "train", *words, "--resume", "--accept-changes")
    assert code == 0, printed
    summary = json.loads(Path("runs/run/summary.json").read_text())
    assert summary["base"]["brightness"]["mean"] > 289
    assert abs(summary["difference"]["brightness"]["mean"]) < 1
    assert "since iteration 1" in Path("runs/run/gallery/index.html").read_text()


@pytest.mark.slow
def test_a_base_that_is_gone_or_foreign_is_made_anew_from_untouched_weights(place):
    train("iterations=1", "data.max_eval_prompts=2")
    file = Path("runs/run/eval/base.json")
    first = evaluation("run", "base")
    foreign = first | {"scores": {"brightness": [[-9.0], [-9.0]]}, "made_with": first["made_with"] | {"model": "other"}}
    file.write_text(json.dumps(foreign))
    train("iterations=2", "data.max_eval_prompts=2", resume=True)
    assert evaluation("run", "base") == first
    file.unlink()
    train("iterations=2", "data.max_eval_prompts=2", resume=True)
    assert evaluation("run", "base") == first


@pytest.mark.slow
@follows("flowrl/data/contents.py:require_comparable")
def test_runs_whose_reward_or_held_out_prompts_were_edited_in_between_are_not_compared(place, monkeypatch, capsys):
    (place / "held.txt").write_text("a red square\na blue circle\n")
    words = ("iterations=0", "data.eval_prompts=held.txt")
    train("name=one", *words)
    (place / "held.txt").write_text("a red square\na blue cross\n")
    train("name=two", *words)
    code, printed = command(monkeypatch, capsys, "gallery", "runs/one", "runs/two", "--out", "page")
    assert code == 2
    for word in ("runs/one", "runs/two", "held.txt", "'a blue circle'", "'a blue cross'", "--accept-changes"):
        assert word in printed
    code, printed = command(monkeypatch, capsys, "gallery", "runs/one", "runs/two", "--out", "page", "--accept-changes")
    assert code == 0, printed


@pytest.mark.slow
def test_an_adapter_that_is_older_than_the_checkpoint_is_written_anew(place, monkeypatch, capsys):
    """A kill or a full disk between the last checkpoint and its adapter left a finished run with an older one."""
    from safetensors.torch import load_file

    lora = ("model.lora={rank: 2, alpha: 4}", "data.max_eval_prompts=2")
    train("iterations=2", *lora)
    adapter = Path("runs/run/adapter")
    newest = load_file(adapter / "pytorch_lora_weights.safetensors")
    shutil.copytree(adapter, "whole")

    def spoil() -> None:
        shutil.rmtree(adapter)
        shutil.copytree("whole", adapter)
        (adapter / "pytorch_lora_weights.safetensors").write_bytes(b"torn")
        (adapter / "flowrl.json").write_text('{"iteration": 1}')

    def mended() -> bool:
        found = load_file(adapter / "pytorch_lora_weights.safetensors")
        same = found.keys() == newest.keys() and all(torch.equal(found[name], newest[name]) for name in newest)
        return same and json.loads((adapter / "flowrl.json").read_text()) == {"iteration": 2}

    for words in (
        ("export", "runs/run", "--out", "exported"),
        ("eval", "runs/run"),
        ("train", "run.yaml", "iterations=2", *lora, "--resume"),
    ):
        spoil()
        code, printed = command(monkeypatch, capsys, *words)
        assert code == 0, printed
        assert "is not that of the checkpoint of iteration 2" in printed
        assert mended()
    assert load_file("exported/pytorch_lora_weights.safetensors").keys() == newest.keys()
