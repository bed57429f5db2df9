"""Held-out prompts of a real run: never trained on, and named wherever a number is told."""

import json
from pathlib import Path

import pytest

from flowrl import shapes
from flowrl.commands.train import AFTER
from flowrl.config.load import load_config, resolve
from flowrl.data.prompts import PromptSource
from flowrl.run.trainer import Trainer
from tests.e2e.conftest import train
from tests.e2e.test_bad_input import command

SMALL = ("rollout.num_inference_steps=2", "iterations=2", "eval.every=1")


@pytest.fixture
def forty(place: Path) -> Path:
    (place / "forty.txt").write_text("\n".join(shapes.prompts("train")[:40]))
    return place


def told(run: str) -> tuple[dict, str]:
    """(summary, what was said)."""
    folder = Path("runs") / run
    return json.loads((folder / "summary.json").read_text()), (folder / "train.log").read_text()


def test_a_share_of_the_prompts_is_evaluated_and_not_trained_on(forty: Path, monkeypatch, capsys):
    trainer = Trainer(resolve(load_config("run.yaml", ["name=share", "data={prompts: forty.txt}", *SMALL])))
    trainer.fit()
    source = trainer.session.parts.data.source
    assert isinstance(source, PromptSource)
    trained = {prompt.text for prompt in source.prompts}
    evaluated = set(json.loads(Path("runs/share/eval/tuned.json").read_text())["prompts"])
    assert (len(trained), len(evaluated), trained & evaluated) == (36, 4, set())
    summary, said = told("share")
    assert summary["evaluated_on"] == "held-out prompts"
    assert summary["held_out"] == {
        "source": "data.eval_share=0.1 of data.prompts=forty.txt, drawn by seed 0",
        "prompts": 4,
        "share": 0.1,
    }
    assert "36 train and 4 held-out prompts" in said
    assert "held out: data.eval_share=0.1 of data.prompts=forty.txt, drawn by seed 0" in said
    code, printed = command(monkeypatch, capsys, "eval", "runs/share", "seed=1")
    assert code == 2
    assert "seed was 0, now 1" in printed


@pytest.mark.slow
def test_without_held_out_prompts_every_number_is_of_training_prompts(forty: Path, monkeypatch, capsys):
    train("name=none", "data={prompts: forty.txt, eval_share: 0, max_eval_prompts: 3}", *SMALL, after=AFTER)
    summary, said = told("none")
    assert (summary["evaluated_on"], summary["held_out"]) == ("training prompts", None)
    numbers = [line for line in said.splitlines() if "brightness" in line or "paired difference" in line]
    assert len(numbers) >= 6
    assert all("training prompts" in line for line in numbers if "iteration 2/2" not in line)  # no evaluation there
    assert "40 training prompts, 3 of them evaluated and none held out" in said
    assert "held-out" not in said.replace("so their numbers are not held-out", "")
    page = Path("runs/none/gallery/index.html").read_text()
    assert "No verdict: no prompts were held out" in page
    code, printed = command(monkeypatch, capsys, "eval", "runs/none")
    assert code == 0, printed
    assert "3 training prompts x 1 seeds" in printed
    assert "win rate on training prompts" in printed
