"""Remedies of runs: what is torn, what a divergence or a changed option asks for."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from flowrl.core.errors import ConfigError, Moved
from flowrl.run import handover
from flowrl.run.session import Session
from flowrl.run.trained import learned_noise
from flowrl.training.metrics import repeatable
from tests.e2e.conftest import place as place
from tests.e2e.conftest import train
from tests.e2e.test_bad_input import command
from tests.e2e.test_find import FIND
from tests.remedies import follows


@pytest.mark.slow
@follows("flowrl/run/trained.py:learned_noise")
def test_torn_noise_distributions_are_written_again_by_the_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (place / "three.txt").write_text("a red circle\na blue square\ntwo green crosses\n")
    train("iterations=1", *FIND)
    file = Path("runs/run/adapter/learned_noise.safetensors")
    whole = file.read_bytes()
    file.unlink()
    handover.begin(Path("runs/run"))
    with pytest.raises(ConfigError) as caught:
        learned_noise(Path("runs/run"))
    (remedy,) = caught.value.remedies
    code, printed = command(monkeypatch, capsys, *shlex.split(remedy.command)[1:])
    assert code == 0, printed
    assert file.read_bytes() == whole
    assert learned_noise(Path("runs/run")) is not None


@pytest.mark.slow
@follows("flowrl/run/changes.py:Accepted.require", "flowrl/run/changes.py:Accepted.require#2")
def test_a_run_at_another_rate_goes_on_with_the_old_one_or_accepts_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ("data.max_eval_prompts=1", "rollout.num_inference_steps=2")
    train("iterations=1", *words)
    with pytest.raises(ConfigError) as caught:
        train("iterations=1", *words, "optim.learning_rate=1e-05", "eval.every=1")
    old, accepts = (remedy.command for remedy in caught.value.remedies)
    for command_line, rate in ((old, 1e-3), (accepts, 1e-5)):
        code, printed = command(monkeypatch, capsys, *shlex.split(command_line)[1:])
        assert code == 0, printed
        assert yaml.safe_load(Path("runs/run/config.yaml").read_text())["optim"]["learning_rate"] == rate


@follows("flowrl/run/ending.py:Ending.leave")
def test_a_run_that_diverged_finishes_by_the_command_that_it_gives(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first update at 1e30 ends iteration 2 with finite weights, whose checkpoint would only end the run again."""
    words = ("data.max_eval_prompts=1", "rollout.num_inference_steps=2", "optim.updates_per_iteration=1")
    train("iterations=1", *words)
    wild = ("optim.learning_rate=1e30", "optim.max_grad_norm=null")
    keys = ("--resume", "--accept-changes", "optim.learning_rate", "optim.max_grad_norm")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=3", *words, *wild, *keys)
    assert code == 1, printed
    assert "in iteration 3 (8 of 8 samples): the gradient norm was" in printed
    assert [entry.name for entry in sorted(Path("runs/run/checkpoints").iterdir())] == [
        "diverged-000002",
        "iteration-000001",
    ]
    told = json.loads(Path("runs/run/summary.json").read_text())
    assert told["status"] == "diverged"
    assert told["command"] in printed
    code, printed = command(monkeypatch, capsys, *shlex.split(told["command"])[1:])
    assert code == 0, printed
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["optim/learning_rate"] for row in rows] == [1e-3, 3e-4, 3e-4]


@pytest.mark.slow
@follows("flowrl/run/folder.py:RunFolder.require_own")
def test_a_run_whose_folder_is_moved_stops_and_goes_on_where_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The folder is moved while iteration 2 is trained, and its rows are those of the run that nothing disturbed."""
    words = ("iterations=3", "eval.every=2", "data.max_eval_prompts=1", "rollout.num_inference_steps=2")
    train("name=whole", *words)
    step = Session.step

    def moved(self: Session, iteration: int) -> dict:
        if iteration == 2:
            Path("runs/run").rename("runs/other")
        return step(self, iteration)

    monkeypatch.setattr(Session, "step", moved)
    with pytest.raises(Moved, match=r"runs/run was moved to .*runs/other") as caught:
        train(*words)
    monkeypatch.setattr(Session, "step", step)
    assert not Path("runs/run").exists(), "nothing is made again without its lock"
    (remedy,) = caught.value.remedies
    code, printed = command(monkeypatch, capsys, *shlex.split(remedy.command)[1:])
    assert code == 0, printed
    texts = [Path(f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("whole", "other")]
    whole, other = ([repeatable(json.loads(row)) for row in rows] for rows in texts)
    assert other == whole
