"""How runs end before their end: nothing finished is lost, and the folder says what happened."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.algorithms import flow_grpo
from flowrl.core.errors import RewardError, Stopped
from flowrl.rollout.policy import Policy
from flowrl.run import state, status
from flowrl.training.metrics import repeatable
from tests.e2e.conftest import BASE, digest, finish, start, train

SMALL = (
    *("iterations=3", "rollout.group_size=2", "optim.updates_per_iteration=1", "model.lora={rank: 4, alpha: 8}"),
    *("eval.every=2", "eval.periodic_prompts=4", "eval.batch_size=2", "checkpoint.every=100"),
    "algorithm.advantages={name: batch, history: {buffer_size: 8, min_count: 2}}",
    "data.max_prompts=2",  # met in every iteration: what the method remembers of them counts
)
REWARD = """
import os

calls = 0

def score(images, prompts, metadata):
    global calls
    calls += 1
    at, what = os.environ["AT"].split(":", 1)
    if str(calls) == at:
        exec(what, {"os": os})
    return images.mean(dim=(1, 2, 3))
"""
# Calls of that reward: four of two probes, the base evaluation's two batches, a rollout, another, the two batches of
# the evaluation after iteration 2, the last rollout, and the last evaluation's.
ROLLOUT_1, EVALUATION_2, ROLLOUT_3 = 7, 9, 11
KILL = "os.kill(os.getpid(), 15)"
BREAK = "from flowrl.reward import RewardError; raise RewardError('it has no score for that')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """run(name, "5:raise ValueError()"): train with a reward that does something at its fifth call."""
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "brightness.py").write_text(REWARD)
    monkeypatch.chdir(folder)

    def go(name: str, at: str = ":", resume: bool = False) -> dict:
        monkeypatch.setenv("AT", at)
        return train(f"name={name}", *SMALL, resume=resume)

    if not Path("runs/whole").is_dir():
        go("whole")
    return go


def summary(name: str) -> dict[str, Any]:
    return status.read(Path("runs") / name)


def assert_undisturbed(name: str) -> None:
    """Rows, times apart, evaluations and final weights are those of the run that nothing has disturbed."""
    found = []
    for run in (name, "whole"):
        rows = [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]
        kept = [repeatable(row) for row in rows]
        texts = {file.name: file.read_text() for file in sorted(Path(f"runs/{run}/eval").glob("*.json"))}
        found.append((kept, texts, digest(run, 3)))
    assert found[0] == found[1]
    assert summary(name)["status"] == "finished"
    assert not {"reason", "command"} & summary(name).keys()


def test_an_evaluation_that_is_stopped_twice_and_killed_behind_its_row_is_made_once(run, monkeypatch):
    with pytest.raises(Stopped):
        run("parts", f"{EVALUATION_2}:{KILL}")
    ended = summary("parts")
    assert (ended["status"], ended["iterations"], ended["reason"]) == ("stopped", 2, "signal 15")
    assert ended["command"].endswith("--resume")
    with pytest.raises(Stopped):
        run("parts", f"5:{KILL}", resume=True)  # the evaluation that is due is the first thing after the probes
    with monkeypatch.context() as patch:

        def killed(*args: object, **options: object) -> None:
            raise RuntimeError("killed before the checkpoint says that nothing is due any more")

        patch.setattr(state.Saver, "save", killed)
        with pytest.raises(RuntimeError, match="killed before"):
            run("parts", resume=True)
    run("parts", resume=True)
    assert_undisturbed("parts")


@pytest.mark.slow
@pytest.mark.parametrize("call", [ROLLOUT_1, ROLLOUT_3])
def test_a_run_that_a_signal_stops_in_a_rollout_becomes_the_undisturbed_one(run, call: int):
    with pytest.raises(Stopped):
        run(f"call-{call}", f"{call}:{KILL}")
    run(f"call-{call}", resume=True)
    assert_undisturbed(f"call-{call}")


@pytest.mark.slow
def test_a_signal_is_followed_between_two_forwards_of_a_batch(run, monkeypatch):
    predict, forwards = Policy.predict, []

    def counted(self: Policy, *args: Any) -> Any:
        forwards.append(args)
        if len(forwards) == 8:  # the second of the first rollout: the base evaluation has made six
            os.kill(os.getpid(), signal.SIGINT)
        return predict(self, *args)

    monkeypatch.setattr(Policy, "predict", counted)
    with pytest.raises(Stopped) as caught:
        run("forwards")
    assert caught.value.number == signal.SIGINT
    assert len(forwards) == 8


def _credit_fails_at(number: int, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    build, asked = flow_grpo.build, []

    def failing(config: Any) -> Any:
        algorithm: Any = build(config)
        credit = algorithm.advantages

        def advantages(*args: Any) -> Any:
            asked.append(credit(*args))  # what the method remembers has moved
            if len(asked) == number:
                raise error
            return asked[-1]

        algorithm.advantages = advantages
        return algorithm

    patch.setattr(flow_grpo, "build", failing)


@pytest.mark.parametrize("phase", ["credit", *(pytest.param(p, marks=pytest.mark.slow) for p in ("rollout", "eval"))])
def test_a_failure_saves_the_last_finished_iteration_and_the_folder_tells_it(run, monkeypatch, phase: str):
    with monkeypatch.context() as patch:
        if phase == "credit":
            _credit_fails_at(3, patch, ZeroDivisionError("no spread"))
        at = {"rollout": f"{ROLLOUT_3}:{BREAK}", "eval": f"{EVALUATION_2}:{BREAK}"}.get(phase, ":")
        with pytest.raises((ZeroDivisionError, RewardError)):
            run(phase, at)
    ended = summary(phase)
    assert (ended["status"], ended["iterations"], ended["saved"]) == ("failed", 2, "iteration 2 is saved")
    reason = "ZeroDivisionError: no spread (test_ends.py:" if phase == "credit" else "it has no score for that"
    assert reason in ended["reason"]
    logged = Path(f"runs/{phase}/train.log").read_text().splitlines()
    assert any(" ERROR " in line and reason in line for line in logged)
    assert any(" DEBUG Traceback (most recent call last)" in line for line in logged)
    assert not [line for line in logged if not line.startswith("20")], "every line has its time"
    run(phase, resume=True)
    assert_undisturbed(phase)


@pytest.mark.slow
def test_an_update_that_fails_leaves_the_last_checkpoint_alone(run, monkeypatch):
    from flowrl.training.optim import Optimizer

    step, steps = Optimizer.step, []

    def failing(self: Optimizer, *given: Any) -> Any:
        steps.append(step(self, *given))
        if len(steps) == 2:
            raise ArithmeticError("in the second step")
        return steps[-1]

    monkeypatch.setattr(Optimizer, "step", failing)
    with pytest.raises(ArithmeticError):
        run("update")
    assert (summary("update")["status"], summary("update")["iterations"]) == ("failed", 1)
    assert not list(Path("runs/update/checkpoints").glob("*"))


@pytest.mark.slow
def test_sys_exit_in_the_code_of_a_run_is_no_success(run, monkeypatch, capsys):
    from flowrl.cli import main

    monkeypatch.setenv("AT", ":")
    _credit_fails_at(1, monkeypatch, SystemExit(0))
    monkeypatch.setattr(sys, "argv", ["flowrl", "train", "run.yaml", "name=exit", *SMALL])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert summary("exit")["status"] == "failed"
    assert "called sys.exit(0) in test_ends.py:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_dies_alone_loses_nothing_of_the_others(run, monkeypatch):
    # Of the base evaluation each process has one batch, so this is the second rollout.
    monkeypatch.setenv("AT", f"{ROLLOUT_1}:os.environ['RANK'] == '1' and os._exit(7)")
    code, printed = finish(start("train", "run.yaml", "name=alone", *SMALL, "--processes", "2"))
    assert code == 7, printed
    assert "another process of this run has ended" in printed
    ended = summary("alone")
    assert (ended["status"], ended["iterations"]) == ("failed", 1)
    assert "another process of this run has ended" in ended["reason"]
    assert ended["command"].endswith("--processes 2 --resume")
    assert [file.name for file in Path("runs/alone/checkpoints").iterdir()] == ["iteration-000001"]
