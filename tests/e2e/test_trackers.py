"""Trackers beside a real run: its curves in their files, each iteration once, also after kill -9 and a rename."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.run.tracker_runs import wandb_rows
from tests.e2e.conftest import digest, finish, start, train
from tests.e2e.test_reproducible import _wait_for


def assert_tensorboard_has(run: Path) -> None:
    """Every number of `metrics.jsonl`, in float32 and once, between the base's means and the result's."""
    read = EventAccumulator(str(run / "trackers/tensorboard"), {"scalars": 0, "images": 0}).Reload()
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in told for name, value in row.items() if isinstance(value, int | float)} - {"iteration"}
    for name in names:
        curve = [(event.step, event.value) for event in read.Scalars(name)]
        wanted = [(row["iteration"], float(np.float32(row[name]))) for row in told if row.get(name) is not None]
        if name.startswith("eval/"):
            curve = curve[1:-1]
        assert curve == wanted, name
    assert [event.step for event in read.Scalars("eval/brightness")] == [0, len(told)]
    summary = json.loads((run / "summary.json").read_text())
    assert [event.value for event in read.Scalars("summary/iterations")] == [summary["iterations"]]
    assert [event.step for event in read.Images("eval/images")] == [0, len(told)]


@pytest.mark.slow
def test_curves_are_the_metrics_over_a_resumption_and_the_training_is_bitwise_that_without(place: Path):
    words = ("data.max_eval_prompts=2", "model.lora={rank: 2, alpha: 4}")
    train("name=plain", "iterations=2", *words)
    train("name=run", "iterations=1", *words, "trackers=[tensorboard]")
    train("name=run", "iterations=2", *words, "trackers=[tensorboard]", resume=True)
    assert digest("plain", 2) == digest("run", 2)
    read = EventAccumulator("runs/run/trackers/tensorboard").Reload()
    told = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    wanted = [(row["iteration"], float(np.float32(row["policy/loss"]))) for row in told]
    assert [(event.step, event.value) for event in read.Scalars("policy/loss")] == wanted
    assert not Path("runs/plain/trackers.json").exists()


@pytest.mark.slow
def test_kill_9_a_rename_and_a_resumption_leave_each_iteration_once_in_tensorboard_and_in_wandb(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ("iterations=8", "checkpoint.every=2", "trackers=[tensorboard, {name: wandb, project: tests}]")
    process = start("train", "run.yaml", *words)
    _wait_for(Path("runs/run/metrics.jsonl"), '"iteration": 5', process)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    Path("runs/run").rename("runs/other")
    code, output = finish(start("train", "runs/other", "--resume"))
    assert code == 0, output
    run = Path("runs/other")
    assert_tensorboard_has(run)
    files = sorted(run.glob("trackers/wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "one id"
    found = [row for file in files for row in wandb_rows(file)]
    assert [row["_step"] for row in found] == list(range(9))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        told = {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}
        sent = found[int(told.pop("iteration"))]
        assert {name: sent[name] for name in told} == told
