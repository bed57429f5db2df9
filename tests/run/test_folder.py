"""A run folder that is moved, deleted or replaced while its run is under way."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.apps.pairs.folder import PairFolder
from flowrl.core.errors import ConfigError, Moved
from flowrl.run import checkpoint, handover
from flowrl.run.folder import RunFolder
from flowrl.run.launch import LOCKED
from tests.e2e.conftest import finish, place, start, train

__all__ = ["place"]


def test_a_folder_that_is_moved_before_a_worker_has_started_is_not_made_again(tmp_path, monkeypatch):
    launcher, worker = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    monkeypatch.setenv(LOCKED, str(launcher.lock()))
    assert worker.hold()
    worker.unlock()
    os.rename(tmp_path / "run", tmp_path / "other")
    with pytest.raises(Moved, match=rf"run was moved to {tmp_path}/other"):
        worker.hold()
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv(LOCKED)
    assert not RunFolder(tmp_path / "free").hold()


def test_a_folder_that_is_no_longer_the_locked_one_takes_no_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    descriptor = folder.lock()
    folder.write_json("summary.json", {})
    worker = RunFolder(tmp_path / "run")
    monkeypatch.setenv(LOCKED, str(descriptor))
    assert worker.hold()
    os.rename(tmp_path / "run", tmp_path / "other")
    for held in (folder, worker):
        for write in (lambda held=held: held.add_row({"iteration": 1}), lambda held=held: held.write_json("x", {})):
            with pytest.raises(Moved, match=rf"run was moved to {tmp_path}/other while") as caught:
                write()
            assert [str(remedy) for remedy in caught.value.remedies] == [f"run flowrl train {tmp_path}/other --resume"]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder(tmp_path / "other").lock(0.0)
    second = RunFolder(tmp_path / "run")  # the folder is made again: another run has it
    second.lock(0.0)
    with pytest.raises(Moved, match="was moved to"):
        folder.add_row({"iteration": 1})
    second.add_row({"iteration": 1})
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(Moved, match=r"run was replaced by another while .* what it held is gone") as caught:
        folder.require_own()
    assert not caught.value.remedies
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Moved, match=r"run was deleted while .* what it held is gone"):
        folder.require_own()


def test_a_move_between_the_checkpoint_and_the_weights_is_said_and_makes_no_second_folder(place, monkeypatch):
    """No full disk is blamed, and the command that goes on is that of the moved folder: the old one starts anew."""
    save = checkpoint.save

    def moving(*args: Any, **options: Any) -> Path:
        made = save(*args, **options)
        os.rename("runs/run", "runs/other")
        return made

    monkeypatch.setattr(checkpoint, "save", moving)
    with pytest.raises(Moved, match=f"run was moved to {place}/runs/other while") as caught:
        train("iterations=1", "data.max_eval_prompts=1", "rollout.num_inference_steps=2")
    assert [str(remedy) for remedy in caught.value.remedies] == [f"run flowrl train {place}/runs/other --resume"]
    assert not Path("runs/run").exists()
    monkeypatch.setattr(checkpoint, "save", save)
    assert train("iterations=1", "data.max_eval_prompts=1", "name=other", "rollout.num_inference_steps=2", resume=True)
    assert handover.outdated(Path("runs/other")) is None


def test_a_folder_of_pairs_that_was_moved_takes_no_line(tmp_path):
    lock = RunFolder(tmp_path / "pairs", "--out")
    lock.lock()
    folder = PairFolder(tmp_path / "pairs", {}, {})
    folder.begin()
    folder.require_own = lock.require_own
    os.rename(tmp_path / "pairs", tmp_path / "other")
    with pytest.raises(Moved, match="was moved to") as caught:
        folder.append([{"prompt": "a"}], {"groups": 1, "last_pair": 0})
    assert not caught.value.remedies
    assert not (tmp_path / "pairs").exists()


@pytest.mark.slow
def test_two_processes_stop_where_their_folder_is_moved(place):
    """The first process finds it, and the second ends with it; the rows lie where the folder is."""
    (place / "moving.py").write_text(
        "import os\ncalls = []\ndef score(images, prompts, metadata):\n    calls.append(len(prompts))\n"
        "    if os.path.exists('runs/run/checkpoints/iteration-000001') and os.environ['RANK'] == '0':\n"
        "        os.rename('runs/run', 'runs/other')\n    return images.mean(dim=(1, 2, 3))\n"
    )
    words = ("iterations=3", "data.max_eval_prompts=2", "rollout.num_inference_steps=2")
    rewards = "rewards=[{path: moving.py, isolate: false}]"
    code, printed = finish(start("train", "run.yaml", *words, rewards, "--processes", "2"))
    assert code == 1, printed
    assert "runs/run was moved to" in printed
    assert "Traceback" not in printed
    assert not Path("runs/run").exists()
    rows = Path("runs/other/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [1]
    code, printed = finish(start("train", "runs/other", "--processes", "2", "--resume"))
    assert code == 0, printed
    rows = Path("runs/other/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [1, 2, 3]
