"""Checkpoints of full weights, written in a thread while the next iteration runs."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.core.background import Background
from flowrl.core.errors import Stopped, UnwritableCheckpoint
from flowrl.run import checkpoint, state
from flowrl.run.session import Session
from flowrl.training.metrics import repeatable
from tests.e2e.conftest import train

SMALL = (
    "iterations=3",
    "data.eval_prompts=null",
    "data.max_eval_prompts=null",
    "rollout.num_inference_steps=2",
    "optim.updates_per_iteration=1",
)


@pytest.fixture
def threads(monkeypatch, place) -> list[Background]:
    """Every state counts as large; the threads that wrote one."""
    made: list[Background] = []

    def begun(work: Callable[[], object]) -> Background:
        made.append(Background(work))
        return made[-1]

    monkeypatch.setattr(state, "_LARGE", 0)
    monkeypatch.setattr(state, "Background", begun)
    return made


def written(run: str) -> dict[str, str]:
    """Digests of what a run leaves of its weights, and the rows of its metrics without times."""
    folder = Path("runs") / run
    # The card next to the weights tells the time and the name of the run.
    weights = (file for file in folder.glob("adapter/**/*") if file.is_file() and file.name != "README.md")
    files = [*folder.glob("checkpoints/*/state.safetensors"), *weights]
    found = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[f"row {row['iteration']}"] = str(repeatable(row))
    return found


def test_the_files_of_a_thread_are_those_that_are_waited_for(threads, monkeypatch):
    train("name=thread", *SMALL)
    assert [thread.ended.is_set() for thread in threads] == [True, True]  # the last checkpoint is waited for
    monkeypatch.setattr(state, "_LARGE", 2**40)
    train("name=waited", *SMALL)
    assert len(threads) == 2
    assert written("thread") == written("waited")


def test_a_thread_that_fails_stops_the_run_like_any_checkpoint(threads, monkeypatch):
    save = checkpoint.save

    def full(folder: Path, saved: Any, *rest: Any, **options: Any) -> Path:
        if saved.iteration == 2:
            raise UnwritableCheckpoint("could not save: no space left")
        return save(folder, saved, *rest, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(UnwritableCheckpoint, match="no space left"):
        train("name=full", *SMALL, "checkpoint.every=2", "iterations=8")
    assert checkpoint.available(Path("runs/full/checkpoints"))[:1] != [2]
    assert json.loads(Path("runs/full/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_signal_waits_for_the_thread_and_the_resumed_run_is_the_undisturbed_one(threads, monkeypatch):
    train("name=undisturbed", *SMALL)
    save, roll_out = checkpoint.save, Session.roll_out

    def slow(*given: Any, **options: Any) -> Path:
        time.sleep(1.0)
        return save(*given, **options)

    def stopped(self: Session, iteration: int) -> Any:
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return roll_out(self, iteration)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", slow)
        patch.setattr(Session, "roll_out", stopped)
        with pytest.raises(Stopped):
            train("name=stopped", *SMALL)
    assert checkpoint.available(Path("runs/stopped/checkpoints"))[-1] == 2
    train("name=stopped", *SMALL, resume=True)
    assert written("stopped") == written("undisturbed")
