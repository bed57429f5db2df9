"""A disk that fails while training, and a run folder that was damaged behind it: what is safe, and how to go on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.models.weights.roles import Weights
from tests.e2e.conftest import digest, train
from tests.e2e.test_bad_input import command

SMALL = ("data.max_eval_prompts=1", "rollout.num_inference_steps=2", "optim.updates_per_iteration=1")


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


PLACES = {
    "adapter": (Weights, "save", "adapter could not be written", "the checkpoint of iteration 1 is safe"),
    "pictures": (Image.Image, "save", "eval/base/00000-0.png could not be written", "is safe"),
    "report": (os, "replace", "index.html could not be written", "the run itself is safe"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "adapter" else pytest.mark.slow) for name in PLACES]
)
def test_a_full_disk_is_told_and_the_run_goes_on(place, monkeypatch, capsys, name):
    owner, function, told, safe = PLACES[name]
    replace = os.replace
    if name == "report":
        monkeypatch.setattr(owner, function, lambda a, b: full() if Path(b).name == "index.html" else replace(a, b))
    else:
        monkeypatch.setattr(owner, function, full)
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=1", *SMALL)
    assert code == 1, printed
    for words in (told, safe, "No space left on device", "--resume"):
        assert words in printed
    assert "Traceback" not in printed
    monkeypatch.undo()
    monkeypatch.chdir(place)
    result = train("iterations=1", *SMALL, resume=True)
    assert result["status"] == "finished"
    assert digest("run", 1)


@pytest.mark.slow
def test_a_damaged_run_is_named_before_anything_is_drawn_or_trained(place, monkeypatch, capsys):
    train("iterations=1", *SMALL)
    base, rows = Path("runs/run/eval/base.json"), Path("runs/run/metrics.jsonl")
    calls = {
        ("train", "run.yaml", "iterations=2", *SMALL, "--resume"): "base.json",
        ("eval", "runs/run"): "base.json",
        ("gallery", "runs/run"): "base.json",
    }
    whole = base.read_bytes()
    base.write_bytes(whole[:-30])
    for words, file in calls.items():
        code, printed = command(monkeypatch, capsys, *words)
        assert (code, file in printed, "restore it from a copy" in printed) == (2, True, True), printed
        assert "Traceback" not in printed
    base.unlink()
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=2", *SMALL, "--resume")
    assert code == 0, printed
    assert base.read_bytes() == whole, "one that is gone is made anew, with the untouched weights"
    rows.write_bytes(b"\xff\n" + rows.read_bytes())
    for words in (("train", "run.yaml", "iterations=2", *SMALL, "--resume"), ("gallery", "runs/run")):
        code, printed = command(monkeypatch, capsys, *words)
        assert code == 2, printed
        assert "metrics.jsonl:1 is not a JSON object with an iteration" in printed
