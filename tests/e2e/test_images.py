"""Prompt records with pictures through the real loop."""

import json
from pathlib import Path

import pytest

from tests import tiny_pipelines as tiny
from tests.e2e.conftest import train, with_images
from tests.e2e.test_bad_input import command

REWARD = """
from pathlib import Path

def score(images, prompts, metadata):
    names = [[Path(name).name for name in record["images"]] for record in metadata]
    assert all(name == [prompt + ".png"] for name, prompt in zip(names, prompts)), names
    return images.mean(dim=(1, 2, 3))
"""


@pytest.fixture
def records(place: Path) -> Path:
    """The folder of a run, with `pictures.jsonl`: two prompts with a picture each."""
    return with_images(place, "pictures.jsonl", 12, 20, REWARD)


def test_a_pipeline_with_pictures_is_trained_and_its_rewards_find_them(records: Path):
    tiny.make("flux_kontext").save_pretrained(records / "kontext")
    summary = train(
        "iterations=2",
        "model={name: generic, path: ./kontext, height: 16, width: 16, lora: {rank: 2, alpha: 4}, "
        f"call: {{max_sequence_length: {tiny.TOKENS}, _auto_resize: false}}}}",
        "data={prompts: pictures.jsonl, eval_prompts: pictures.jsonl}",
        "eval={num_inference_steps: 2, batch_size: 2}",
    )
    assert summary["status"] == "finished"
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/masked"] for row in rows] == [0, 0]
    assert all(row["grad/norm"] > 0 for row in rows)


@pytest.mark.slow
def test_a_native_adapter_refuses_pictures_before_training(records: Path, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "data.prompts=pictures.jsonl")
    assert code == 2, printed
    assert "data.prompts: prompt 1, 'red', has 1 image(s), but StableDiffusion3Pipeline takes none" in printed
    (records / "blue.png").write_text("broken")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "data.prompts=pictures.jsonl")
    assert code == 2
    assert "line 2: 'blue.png' cannot be read as an image" in printed
