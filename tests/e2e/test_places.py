"""A run is worked with from any folder, and goes on where it was moved to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from flowrl import cli
from tests.e2e.conftest import BASE, BRIGHTNESS, finish, start


def command(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """(exit code, all that is printed) of `flowrl WORDS` in this process."""
    monkeypatch.setattr("sys.argv", ["flowrl", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out + printed.err


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
    assert "add --resume" in printed
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
