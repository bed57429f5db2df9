"""Runs whose model makes NaN, or whose reward fails on the way: the reason, exit code 1, and no process that waits."""

import json
from pathlib import Path

import pytest
import torch

from flowrl.core.errors import Diverged
from tests.e2e.conftest import finish, start, train
from tests.e2e.test_bad_input import command

SHORT = ("iterations=3", "eval.samples_per_prompt=1", "data.max_eval_prompts=2", "checkpoint.every=9")
WILD = ("optim.learning_rate=1e30", "optim.max_grad_norm=null")


@pytest.mark.slow
def test_a_run_whose_weights_overflow_says_since_when_and_what_to_lower(place, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *SHORT, *WILD)
    assert code == 1, printed
    assert "in iteration 2 (8 of 8 samples): the gradient norm was" in printed
    assert "optim.learning_rate is 1e+30, optim.max_grad_norm null; lower the rate, from a state before that" in printed
    assert "a resumed run goes on from the start" in printed
    assert "Traceback" not in printed
    assert "reward 'brightness'" not in printed


def test_bad_updates_are_counted_in_a_row_over_a_resume(place, monkeypatch):
    """Two in an iteration: the run that goes on ends at the fifth, as the undisturbed one does; the first one says that
    it has trained nothing."""
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda gradients: torch.tensor(torch.nan))
    words = ("data.max_eval_prompts=1", "eval.num_inference_steps=1", "eval.samples_per_prompt=1")
    train("iterations=2", *words)
    assert "none of 4 updates was made, since no gradient was finite" in Path("runs/run/train.log").read_text()
    with pytest.raises(Diverged, match="5 updates in a row had a gradient whose norm is nan"):
        train("iterations=3", *words, resume=True)


@pytest.mark.slow
def test_a_constant_reward_is_told_of_and_training_goes_on(place, monkeypatch, capsys):
    (place / "same.py").write_text("def score(images, prompts, metadata):\n    return [0.5] * len(prompts)\n")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *SHORT, "rewards=[{path: same.py}]")
    assert code == 0, printed
    assert printed.count("groups of this iteration dead") == 2, "at the first and the second of three"
    assert "'same' seems constant, with 0.5" in printed


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1e-12", "1e-30"])
def test_rewards_of_a_small_scale_are_told_of_and_training_goes_on(place, monkeypatch, capsys, size):
    """The gradient of the second is 0 in float32, which is no fault of the loss."""
    (place / "small.py").write_text(
        f"def score(images, prompts, metadata):\n    return images.double().mean(dim=(1, 2, 3)) * {size}\n"
    )
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *SHORT, "rewards=[{path: small.py}]")
    assert code == 0, printed
    assert printed.count("the scale of the rewards is too small, and not the learning rate") == 2, "of three"
    assert "(rewards.0.scale=1e+" in printed
    assert "likely cause: The scale of the rewards is too small" in printed
    assert "optim.learning_rate" not in printed
    row = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["reward/group_std"] < float(size), "float32 has no square of 1e-30"
    assert row["advantage/largest"] == pytest.approx(row["reward/group_std"] / 1e-4, rel=5)


@pytest.mark.slow
def test_two_processes_end_together_with_the_reason_of_the_second(place):
    """Eight samples of an iteration on two processes: four each, which no evaluation has; the probes are four calls."""
    (place / "mine.py").write_text(
        "import os, sys\ncalls = []\ndef score(images, prompts, metadata):\n    calls.append(len(prompts))\n"
        "    if len(prompts) == 4 and len(calls) > 4 and os.environ['RANK'] == '1':\n        sys.exit(0)\n"
        "    return images.mean(dim=(1, 2, 3))\n"
    )
    options = ("rewards=[{path: mine.py, isolate: false}]", *SHORT)
    code, printed = finish(start("train", "run.yaml", "--processes", "2", *options))
    assert code == 1, printed
    assert "4 of 4 samples could not be scored" in printed
    assert "SystemExit: 0 (mine.py:6)" in printed
    assert printed.count("flowrl: ") == 1
    assert "Traceback" not in printed
