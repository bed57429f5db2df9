"""Videos from a first frame through the real loop: prompt records, training, the samples that are scored."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests import tiny_pipelines as tiny
from tests.e2e.conftest import train, with_images
from tests.e2e.test_bad_input import command

REWARD = """
import flowrl
from flowrl.media.first_frame import fitted_frame
from flowrl.media.media import open_image, pixels

CARD = flowrl.Card(outputs=("brightness",), modality="video")

def score(images, prompts, metadata):
    given = [pixels(fitted_frame(open_image(r["images"][0]), *images.shape[-2:])) for r in metadata]
    assert images.ndim == 5 and all(frame.shape == video.shape[1:] for frame, video in zip(given, images))
    return images.mean(dim=(1, 2, 3, 4))
"""
SIZES = {"wan_image": (16, 16), "wan_2_2_image": (16, 16), "wan_2_2_frame": (16, 16), "ltx_image": (32, 32)}


@pytest.fixture
def records(place: Path) -> Path:
    """The folder of a run, with `frames.jsonl`: two prompts, each with an image of another aspect ratio than videos."""
    return with_images(place, "frames.jsonl", 24, 40, REWARD)


def saved(name: str, folder: Path) -> str:
    """Options of a model in a folder; that of TI2V-5B names the class of text to video, as the published one."""
    tiny.make(name).save_pretrained(folder / "model")
    pipeline = ""
    if name == "wan_2_2_frame":
        file = folder / "model" / "model_index.json"
        index = json.loads(file.read_text()) | {"_class_name": "WanPipeline"}
        file.write_text(json.dumps({k: v for k, v in index.items() if not k.startswith("image_")}))
        pipeline = "pipeline: WanImageToVideoPipeline, "
    (height, width), call = SIZES[name], json.dumps(tiny.IMAGED[name].call)
    return (
        f"model={{{pipeline or 'name: generic, '}path: ./model, height: {height}, width: {width}, "
        f"lora: {{rank: 2, alpha: 4}}, call: {call}}}"
    )


@pytest.mark.parametrize("name", SIZES)
def test_videos_from_a_first_frame_are_trained(name: str, records: Path):
    summary = train(
        "iterations=3",
        saved(name, records),
        "data={prompts: frames.jsonl, eval_prompts: frames.jsonl}",
        "algorithm={name: flow_grpo, clip_range: 1e-3, kl: {coef: 0.01}}",
        "eval={num_inference_steps: 2, batch_size: 2}",
    )
    assert summary["status"] == "finished"
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert [row["reward/masked"] for row in rows] == [0, 0, 0]
    assert all(row["grad/norm"] > 0 for row in rows)
    assert rows[-1]["policy/kl_reference"] > 0


def test_an_image_that_is_no_first_frame_ends_the_run_before_training(records: Path, monkeypatch, capsys):
    Image.new("RGB", (7, 16)).save(records / "blue.png")
    words = [saved("wan_2_2_frame", records), "data={prompts: frames.jsonl, eval_prompts: frames.jsonl}"]
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *words)
    assert code == 2, printed
    assert "data.prompts: prompt 2, 'blue', has the image" in " ".join(printed.split())
    assert "7 x 16 pixels (width x height) are too few for a frame of 16 x 16" in " ".join(printed.split())
    assert not (records / "runs/run/metrics.jsonl").read_text()
