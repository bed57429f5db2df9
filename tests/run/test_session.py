"""A session is a run without its folder: the same numbers, step by step, and nothing on the disk."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl.config.load import load_config
from flowrl.display.console import LogFile, log
from flowrl.rollout.flop import RowFlop
from flowrl.run.assembly import model
from flowrl.run.gauges import Gauges
from flowrl.run.session import Session
from flowrl.run.trainer import Trainer
from flowrl.training.metrics import repeatable
from tests.e2e.conftest import BASE, BRIGHTNESS

SMALL = ("iterations=2", "rollout.group_size=2", "model.lora={rank: 4, alpha: 8}", "eval.batch_size=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a recipe, and a run of it under runs/run."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE | {"output": str(folder / "runs")}))
    (folder / "brightness.py").write_text(BRIGHTNESS)
    Trainer(load_config(folder / "run.yaml", list(SMALL))).fit()
    return folder


@pytest.fixture
def session(folder: Path) -> Session:
    return Session(folder / "run.yaml", *SMALL)


def test_its_steps_are_those_of_a_run_and_nothing_is_written(folder, session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(folder.rglob("*"))
    rows = [repeatable(session.step(iteration)) for iteration in (1, 2)]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    assert rows == [repeatable(json.loads(line)) for line in lines]
    saved = load_file(folder / "runs/run/checkpoints/iteration-000002/state.safetensors")
    tensors = session.state()[0]
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)
    scores = json.loads((folder / "runs/run/eval/tuned.json").read_text())["scores"]
    assert {name: table.tolist() for name, table in session.evaluate().scores.items()} == scores
    assert sorted(folder.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_ended_holds_no_file_of_its_folder(folder):
    assert not [handler for handler in log.handlers if isinstance(handler, LogFile)]


def test_a_step_is_its_three_parts(session, folder):
    rollout = session.roll_out(1)
    assert session.iteration == 0
    credit = session.credit(rollout)
    row = session.update(rollout, credit)
    assert (session.iteration, session.between_updates) == (1, True)
    assert repeatable(row) == repeatable(Session(folder / "run.yaml", *SMALL).step(1))
    assert 0 < row["time/update_s"] < row["time/iteration_s"]
    assert row["memory/peak_gib"] > 0
    assert row["perf/cpu_s"] > 0
    assert "perf/tflops" not in row, "counting takes seconds, which a run on the CPU does not have"


@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_the_network_is_credited_with_the_forwards_and_backward_passes_of_the_iteration(old, folder):
    session = Session(folder / "run.yaml", *SMALL, f"algorithm.old_log_prob={old}")
    counting = Gauges(session.parts.sampling, counts=True)
    counting.begin()
    rollout = session.roll_out(1)
    row = session.update(rollout, session.credit(rollout))
    found = counting.row({"rollout": 1.5, "update": 2.5, "reward": 9.0}, lambda: RowFlop(1e12, 1e9))
    samples, steps, trained = 4, 3, 2  # without guidance and reference a row is a sample
    forwards = samples * (steps + trained * (1 + (old == "recompute")))  # the parity gate's do not count
    assert found["perf/tflops"] == pytest.approx((forwards + samples * trained / 1000) / 4, rel=1e-3)
    assert found["memory/peak_gib"] >= row["memory/peak_gib"]


def test_images_are_those_that_were_scored(session):
    rollout = session.roll_out(1)
    images = session.images(rollout)
    assert images.shape == (4, 3, 32, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert torch.allclose(images.mean(dim=(1, 2, 3)), rollout.rewards[0].flatten(), atol=1e-6)


def test_its_state_goes_on_in_another_session(session, folder):
    session.step(1)
    tensors, plain = session.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    other = Session(folder / "run.yaml", *SMALL)
    other.load_state(1, tensors, plain)
    assert other.iteration == 1
    assert repeatable(other.step(2)) == repeatable(session.step(2))


def test_a_failed_update_leaves_word_of_it(session, monkeypatch):
    monkeypatch.setattr(session.optimizer, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.step(1)
    assert (session.iteration, session.between_updates) == (0, False)


def test_it_leaves_the_group_that_it_joined_and_no_other(folder, session, monkeypatch):
    closed = []
    monkeypatch.setattr(type(session.world), "close", lambda world: closed.append(world))
    with session as entered:
        assert entered is session
    Session(folder / "run.yaml", *SMALL, world=session.world).close()
    assert len(closed) == 1


def test_overrides_are_for_recipes(folder):
    with pytest.raises(TypeError, match="overrides"):
        Session(load_config(folder / "run.yaml"), "iterations=2")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_rollout_is_strictly_deterministic_unless_a_reward_works_at_the_same_time(folder, monkeypatch, overlap):
    """A reward, whose code is not ours, is warned at most; a setting of the process serves both."""
    session, degrees = Session(folder / "run.yaml", *SMALL), {}
    assert session.rewards is not None
    reward, predict = session.rewards.entries[0].reward, session.model.predict

    def note(name: str, result: Any) -> Any:
        degrees.setdefault(name, set()).add(torch.is_deterministic_algorithms_warn_only_enabled())
        return result

    monkeypatch.setattr(session.model, "predict", lambda *given: note("rollout", predict(*given)))
    score, card = reward.score, dataclasses.replace(reward.card, overlap=overlap)
    object.__setattr__(reward, "score", lambda *given: note("reward", score(*given)))
    object.__setattr__(reward, "card", card)
    session.roll_out(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert degrees == {"rollout": {overlap}, "reward": {True}}


def test_blocks_are_compiled_at_the_shapes_of_updates_and_rollouts_before_training(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(
        model, "probe", lambda adapter, cond, times, scale, trained: tried.append((len(cond), bool(trained)))
    )
    words = ("model.compile=blocks", "optim.batch_size=3", "rollout.batch_size=2")
    with Session(folder / "run.yaml", *SMALL, *words):
        assert tried == [(3, True), (2, False)]
