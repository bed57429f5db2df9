"""FIND on a real pipeline: resumed runs, processes, the network that stays, and what is drawn with the result."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import digest, train
from tests.e2e.test_bad_input import command

FIND = (
    "algorithm={name: find}",
    "rollout.sampler=null",
    "data={prompts: three.txt}",
    "optim={learning_rate: 0.05, weight_decay: 0.0, batch_size: 4, updates_per_iteration: 2, ema: {decay: 0.5}}",
)


@pytest.fixture
def three(place: Path) -> Path:
    (place / "three.txt").write_text("a red circle\na blue square\ntwo green crosses\n")
    return place


def test_a_run_trains_the_noise_alone_resumes_bitwise_and_draws_its_own_prompts(three: Path, monkeypatch, capsys):
    train("name=whole", "iterations=2", *FIND)
    train("name=parts", "iterations=1", *FIND)
    train("name=parts", "iterations=2", *FIND, resume=True)
    assert digest("parts", 2) == digest("whole", 2) != digest("whole", 1)
    weights = [name.split("/") for name in load_file(state("whole", 2)) if name.startswith("weights/")]
    assert {role for _, role, _ in weights} == {"policy", "ema", "critic"}
    laws = {name for _, role, name in weights if role == "policy"}
    assert laws == {f"{kind}.{k}" for kind in ("mean", "std") for k in range(3)}  # no weight of the network
    rows = [json.loads(line) for line in Path("runs/whole/metrics.jsonl").read_text().splitlines()]
    assert all(row["grad/norm"] > 0 and row["nfe/train"] == 0 and row["nfe/rollout"] == 3 for row in rows)
    assert rows[0]["noise/prior"] >= 0
    summary = json.loads(Path("runs/whole/summary.json").read_text())
    assert summary["tuned"]["brightness"]["mean"] != summary["base"]["brightness"]["mean"]

    code, printed = command(monkeypatch, capsys, "sample", "runs/whole", "a blue square", "--count", "2")
    assert code == 0, printed
    assert len(list(Path("samples").glob("*.png"))) == 2
    code, printed = command(monkeypatch, capsys, "sample", "runs/whole", "a red triangle")
    assert code == 2
    assert "'a red triangle': this run learned the initial noise of its own 3 prompts" in printed
    code, printed = command(monkeypatch, capsys, "export", "runs/whole", "--out", "out")
    assert code == 2
    assert "learned the initial noise" in printed
    code, printed = command(monkeypatch, capsys, "eval", "runs/whole", "eval.samples_per_prompt=2")
    assert code == 0, printed
    assert "3 of its own prompts x 2 seeds" in printed


def state(run: str, iteration: int) -> str:
    return f"runs/{run}/checkpoints/iteration-{iteration:06d}/state.safetensors"


@pytest.mark.slow
def test_other_evaluation_prompts_are_refused_and_a_part_of_the_own_ones_is_not(three: Path, monkeypatch, capsys):
    other = ("data={prompts: three.txt, eval_prompts: shapes:heldout}",)
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=0", *FIND, *other)
    assert code == 2
    assert "data.eval_prompts" in printed
    assert "is not a training prompt" in printed
    (three / "one.txt").write_text("two green crosses\n")
    assert (
        train("iterations=0", *FIND, "data={prompts: three.txt, eval_prompts: one.txt}")["base"]["brightness"]["n"] == 1
    )


@pytest.mark.slow
def test_a_drawn_picture_is_the_bases_own_before_training(three: Path, monkeypatch, capsys):
    """mu = 0, s = 1: `flowrl sample` of the run and of the model draw the same."""
    train("name=start", "iterations=1", *FIND, "optim.learning_rate=1e-30", "optim.ema=null")
    for model, out in (("runs/start", "own"), ("tiny-sd3", "base")):
        small = ("--steps", "3", "--guidance", "1.0", "--set", "max_sequence_length=9")
        code, printed = command(monkeypatch, capsys, "sample", model, "a blue square", "--out", out, *small)
        assert code == 0, printed
    from flowrl.media import media

    own, base = (media.read(next(Path(folder).glob("*.png"))) for folder in ("own", "base"))
    assert torch.equal(own, base)
