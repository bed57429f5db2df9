"""Runs that edit: the copy index beside the base's, and what is named before anything is trained."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.apps.gallery import build
from flowrl.core.errors import ConfigError
from flowrl.evaluation import copying
from flowrl.evaluation.results import Evaluation
from scripts.pretraining import kontext
from tests.apps.folders import Page
from tests.e2e.conftest import ROOT, train
from tests.e2e.test_bad_input import command

MODEL = (
    "model={name: generic, path: ./kontext, height: 32, width: 32, lora: {rank: 2, alpha: 4}, "
    "call: {_auto_resize: false, max_sequence_length: 12}}"
)
DATA = "data={prompts: edits.jsonl, eval_prompts: edits.jsonl}"


@pytest.fixture
def edits(place: Path) -> Path:
    """The folder of a run, with an untrained model of edits and four prompts of the lab."""
    kontext.build_pipeline(0, ROOT / "assets/tiny-sd3").save_pretrained(place / "kontext")
    prompts = ROOT / "assets/prompts"
    lines = [json.loads(line) for line in (prompts / "shapes-edit-train.jsonl").read_text().splitlines()[:4]]
    listed = [line | {"image": str(prompts / line["image"])} for line in lines]
    (place / "edits.jsonl").write_text("\n".join(map(json.dumps, listed)))
    return place


def test_the_copy_index_stands_beside_the_bases(edits, monkeypatch, capsys):
    from flowrl.models.generic.adapter import Generic

    fitted, source_of = [], Generic.source_of
    monkeypatch.setattr(Generic, "source_of", lambda self, image: fitted.append(1) or source_of(self, image))
    words = (MODEL, DATA, "iterations=2", "eval={num_inference_steps: 2, batch_size: 4, every: 1, save_images: 0}")
    summary = train(*words, "eval.rewards=[{name: shapes_edit}]")
    found = summary["copy_index"]
    assert set(found) == {"by", "base", "tuned", "difference"}
    assert found["by"] == "edit_unchanged"
    assert (found["base"]["mean"], found["base"]["n"]) == (0.0, 4)
    row = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[0])
    assert row[copying.METRIC] == row["eval/edit_unchanged"] == 0.0
    assert len(fitted) == 4, "once for each source of the whole run"
    base = Evaluation.load(Path("runs/run/eval/base.json"))
    assert base.source_distance is not None
    assert (base.source_distance > copying.NEAR).all()
    # Without the judge it is by pixels, also where a run is evaluated afterwards.
    alone = train(*words, "name=pixels")
    assert alone["copy_index"]["by"] == "pixels"
    code, printed = command(monkeypatch, capsys, "eval", "runs/pixels")
    assert code == 0, printed
    assert "Copy index by pixels, the share of images that leave the place" in printed


def test_a_source_that_does_not_reach_the_network_is_named_before_training(edits, monkeypatch, capsys):
    from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline

    pipe = FluxKontextPipeline.from_pretrained("kontext")
    with torch.no_grad():  # nothing is read from other places
        for name, values in pipe.transformer.named_parameters():
            if ".to_v." in name or ".add_v_proj." in name:
                values.zero_()
    pipe.transformer.save_pretrained("kontext/transformer")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", MODEL, DATA)
    assert code == 2, printed
    assert "data.prompts: prompt 'make the red triangle cyan': another image in place of" in printed
    assert "does not change what FluxKontextPipeline predicts" in printed
    assert not Path("runs/run/metrics.jsonl").read_text()


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_an_animation_as_a_source_is_named_with_its_record(edits, monkeypatch, capsys, suffix):
    frames = [Image.fromarray(np.full((32, 32, 3), level, np.uint8)) for level in (0, 99, 200)]
    frames[0].save(edits / f"moving.{suffix}", save_all=True, append_images=frames[1:])
    (edits / "edits.jsonl").write_text(json.dumps({"prompt": "remove the red circle", "image": f"moving.{suffix}"}))
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", MODEL, DATA)
    assert code == 2, printed
    assert f"line 1: 'moving.{suffix}' cannot be read as an image: it is a video of 3 frames" in printed


def test_a_model_of_edits_without_a_source_says_what_it_makes(edits, capsys):
    (edits / "edits.jsonl").write_text('{"prompt": "a red circle"}')
    train(MODEL, DATA, "iterations=1", "eval={num_inference_steps: 1, batch_size: 4, save_images: 0}")
    printed = capsys.readouterr()
    assert "FluxKontextPipeline edits images, and no prompt has one" in printed.out + printed.err


def test_a_preview_is_the_edit_of_its_source_which_stands_beside_it(edits):
    first, second = (json.loads(line) for line in (edits / "edits.jsonl").read_text().splitlines()[:2])
    listed = []
    for folder, record in (("a", first), ("b", second), ("c", first)):  # of one name, so of the same noise
        (edits / folder).mkdir()
        shutil.copy(record["image"], edits / folder / "x.png")
        listed.append({"prompt": "make it red", "image": f"{folder}/x.png"})
    (edits / "own.jsonl").write_text("\n".join(map(json.dumps, listed)))
    words = (MODEL, DATA, "iterations=1", "eval={num_inference_steps: 2, batch_size: 4, save_images: 0}")
    train(*words, "eval.rewards=[{name: shapes_edit}]", "eval.preview_prompts=own.jsonl")
    run = edits / "runs/run"
    drawn = [(run / f"previews/base/{k:05d}-0.png").read_bytes() for k in range(3)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert len(list((run / "previews/sources").iterdir())) == 2
    page = Page(build([run]))
    assert [value for name, value in page.attributes if name == "alt"].count("source: make it red") == 2
    with pytest.raises(ConfigError, match="prompt 1, 'make it red', has no image, and this run edits images"):
        train(*words, "name=bare", 'eval.preview_prompts=["make it red"]')
