"""assets/tiny-sd: a StableDiffusionPipeline that loads plainly and draws what its record says."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards.shapes import detect, score_scene

from flowrl import shapes
from flowrl.models.pipelines.paths import resolve_path
from scripts.pretraining import report
from scripts.pretraining.__main__ import VAE_FROM
from scripts.pretraining.pipelines import MODELS
from scripts.pretraining.training import Settings
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "assets" / "tiny-sd"
if not (FOLDER / "model_index.json").is_file():
    pytest.skip("not trained yet: python -m scripts.pretraining tiny-sd", allow_module_level=True)
LIMIT = 12_000_000


@cache
def record() -> dict[str, Any]:
    return json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pipe():
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

    loaded = StableDiffusionPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def dtypes(file: Path) -> set[str]:
    """Of the tensors in a safetensors file, from its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


# ---- the asset


def test_it_is_small_holds_no_pickle_and_is_found_by_its_bare_name():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md"}
    assert dtypes(FOLDER / "unet" / "diffusion_pytorch_model.safetensors") == {"F16"}
    assert resolve_path("tiny-sd") == str(FOLDER)


def test_its_parts_are_those_of_stable_diffusion(pipe):
    """Eps prediction on SD 1.5's betas, DDIM with its settings, no safety checker asked for; float32 once loaded."""
    facts = pipe.scheduler.config
    assert type(pipe.scheduler).__name__ == "DDIMScheduler"
    own = {"prediction_type": "epsilon", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    own |= {"num_train_timesteps": 1000, "timestep_spacing": "leading", "steps_offset": 1}
    own |= dict.fromkeys(("set_alpha_to_one", "clip_sample", "thresholding"), False)
    assert {name: facts[name] for name in own} == own
    assert pipe.safety_checker is None
    assert not pipe.config.requires_safety_checker
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    assert [type(part).__name__ for part in parts] == ["UNet2DConditionModel", "AutoencoderKL", "CLIPTextModel"]
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}


def test_a_plain_call_gives_the_recorded_picture(pipe):
    """50 steps with CFG 7.5 from the same noise; block means may differ by rounding, magnified by the guidance."""
    wanted = record()["fingerprint"]
    generator = torch.Generator().manual_seed(wanted["seed"])
    image = pipe(wanted["prompt"], output_type="np", generator=generator).images[0]
    assert image.shape == (32, 32, 3)
    blocks = image.transpose(2, 0, 1).reshape(3, 4, 8, 4, 8).mean(axis=(2, 4))
    assert np.asarray(wanted["blocks"]).std() > 0.05  # not an empty picture
    np.testing.assert_allclose(blocks, wanted["blocks"], rtol=0, atol=0.01)


def test_its_vae_needs_no_shift_and_keeps_pictures(pipe):
    """Latents are standard by the scale alone, which is all that the pipeline undoes when it decodes."""
    assert pipe.vae.config.shift_factor is None
    rng = np.random.default_rng(0)
    scenes = [shapes.parse(caption) for caption in shapes.prompts("heldout")[:96]]
    pictures = torch.from_numpy(np.stack([shapes.draw(scene, rng) for scene in scenes]))
    with torch.no_grad():
        latents = pipe.vae.encode(pictures * 2 - 1).latent_dist.mean * pipe.vae.config.scaling_factor
        decoded = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample / 2 + 0.5
    assert abs(float(latents.mean())) < 0.05
    assert float(latents.std()) == pytest.approx(1, abs=0.05)
    hits = [score_scene(s, detect(i))[0] for s, i in zip(scenes, decoded.clamp(0, 1).numpy(), strict=True)]
    assert np.mean(hits) > 0.97


def test_its_tokenizer_has_the_words_of_the_world_and_spells_others(pipe):
    pieces = pipe.tokenizer.tokenize("two red circles left of a dog")
    assert pieces == ["two</w>", "red</w>", "circles</w>", "left</w>", "of</w>", "a</w>", "d", "o", "g</w>"]
    assert pipe.tokenizer.model_max_length == pipe.text_encoder.config.max_position_embeddings == 12


def test_the_record_is_of_the_scripts_settings():
    """Seed 0 on two processes, and the calls that the script reports; the lab's leaves something to learn."""
    model = MODELS["tiny-sd"]
    options = {"cycles": model.cycles, "vae_from": VAE_FROM["tiny-sd"]}
    settings = Settings(seed=0, processes=2, output=FOLDER, **options)
    assert record()["settings"] == json.loads(json.dumps(settings.facts()))
    assert list(record()["strict"]) == list(model.calls)
    assert 0.30 <= record()["strict"][next(iter(model.calls))]["all"] <= 0.65


@pytest.mark.slow
def test_its_accuracy_is_the_recorded_one(pipe):
    """The lab's call on all 512 held-out captions from the same noise; rounding may turn a few of them."""

    name, (call, _) = next(iter(MODELS["tiny-sd"].calls.items()))
    measured = report.strict_accuracy(pipe, 512, **call)["all"]
    assert measured == pytest.approx(record()["strict"][name]["all"], abs=0.02)
