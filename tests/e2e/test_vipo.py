"""Maps and ratios by position (ViPO) through the real loop on the embedded model."""

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import assert_same_gradient, digest, finish, start, train

SMALL = (
    "iterations=2",
    "data.max_eval_prompts=1",
    "eval={num_inference_steps: 2, batch_size: 2, save_images: 0}",
)
MAPPER = "flowrl.run.assembly.parts.mapper_of"
POSITION = ("algorithm.spatial={ratio: position}", "algorithm.clip_range=0.01")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_maps_of_ones_and_one_ratio_for_all_train_plain_flow_grpo_bitwise(place: Path, monkeypatch):
    train("name=plain", *SMALL)
    monkeypatch.setattr(MAPPER, lambda *_, **__: lambda images: torch.ones(len(images), 8, 8))
    train("name=ones", *SMALL, "algorithm.spatial={ratio: sample}")
    assert digest("ones", 2) == digest("plain", 2)
    assert rows("ones")[1]["spatial/flat_share"] == 1
    assert not [name for name in rows("plain")[1] if "spatial" in name or "maps" in name]


@pytest.mark.slow
def test_a_run_by_position_resumes_bitwise_and_is_evaluated_without_a_backbone(place: Path, monkeypatch):
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer

    train("name=whole", *SMALL, *POSITION)
    train("name=parts", *SMALL, *POSITION, "iterations=1")
    train("name=parts", *SMALL, *POSITION, resume=True)
    assert digest("parts", 2) == digest("whole", 2)
    row = rows("whole")[1]
    assert 0 < row["spatial/map_mean"] < 1
    assert row["grad/norm"] > 0
    assert row["time/maps_s"] > 0
    monkeypatch.setattr(MAPPER, None)
    Trainer(resolve(load_config("run.yaml", [*SMALL, *POSITION]))).evaluate_only(Path("runs/whole"), Path("out"))


@pytest.mark.slow
def test_two_processes_take_the_first_update_of_one(place: Path):
    words = (*SMALL, *POSITION, "iterations=1", "optim.updates_per_iteration=1")
    train("name=one", *words)
    code, output = finish(start("train", "run.yaml", "name=two", *words, "--processes", "2"))
    assert code == 0, output
    one, two = rows("one")[0], rows("two")[0]
    assert one["spatial/map_mean"] == pytest.approx(two["spatial/map_mean"], abs=1e-4)
    assert_same_gradient("one", "two")
