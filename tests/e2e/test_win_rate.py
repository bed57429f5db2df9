"""A run whose images hardly change: its end and its evaluation count ties, and say how little they see."""

import json
from pathlib import Path

import pytest

from flowrl.commands.eval import command
from tests.e2e.conftest import train


def test_what_nobody_sees_is_no_win_in_training_and_in_eval(place: Path, capsys: pytest.CaptureFixture[str]):
    """A learning rate of 1e-5 for one iteration: each image gets brighter, by a fraction of a level."""
    train("iterations=1", "optim.learning_rate=1e-5", "optim.ema=null", "eval.save_images=2")
    summary = json.loads(Path("runs/run/summary.json").read_text())
    found = summary["win_rate"]["brightness"]
    assert summary["difference"]["brightness"]["mean"] > 1e-5
    assert (summary["tie"], found["n"], found["ties"]) == (0.05, 0, 4)
    assert 0 < summary["moved"]["levels"] < 0.5
    assert summary["moved"]["pairs"] == 2
    said = "win rate by brightness: none, since all 4 images are tied (a tie: scores at most "
    levels = f"{summary['moved']['levels']:.3g} of 255 levels."
    moves = f"The weights hardly move: on the same noise the images differ from the base's by {levels}"
    assert said in (printed := capsys.readouterr().out)
    assert moves in printed
    for tie, words in (("0.05", said), ("0", "win rate by brightness: 100.0% of 4 images")):
        command("runs/run", [f"eval.tie={tie}"])
        assert words in (printed := capsys.readouterr().out)
        assert moves in printed
        assert f"base brightness {summary['base']['brightness']['mean']:.4f}" in printed
        assert f"paired difference {summary['difference']['brightness']['mean']:+.4f}" in printed
