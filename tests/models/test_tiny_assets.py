"""assets/tiny-sd, tiny-wan and tiny-kontext: pipelines that load plainly and draw what their records say."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from flowrl.rewards.shapes import detect, score_scene

from flowrl import shapes
from flowrl.models.pipelines.paths import resolve_path
from scripts.pretraining import kontext, kontext_stages, report, wan
from scripts.pretraining.__main__ import VAE_FROM, kontext_settings, parse, wan_settings
from scripts.pretraining.pipelines import MODELS
from scripts.pretraining.training import Settings
from scripts.pretraining.wan_stages import fingerprint, strict_accuracy, vae_strict
from tests.tiny_sd3 import ROOT

LIMIT = 12_000_000
PARTS = {
    "tiny-sd": ["UNet2DConditionModel", "AutoencoderKL", "CLIPTextModel"],
    "tiny-wan": ["WanTransformer3DModel", "AutoencoderKLWan", "UMT5EncoderModel"],
    "tiny-kontext": ["FluxTransformer2DModel", "AutoencoderKL", "CLIPTextModel"],
}
CLASSES = {"tiny-sd": "StableDiffusionPipeline", "tiny-wan": "WanPipeline", "tiny-kontext": "FluxKontextPipeline"}
EACH = pytest.mark.parametrize("name", PARTS)


@cache
def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "assets" / name / "pretraining.json").read_text(encoding="utf-8"))


@cache
def pipe(name: str) -> Any:
    loaded = getattr(diffusers, CLASSES[name]).from_pretrained(ROOT / "assets" / name)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def dtypes(file: Path) -> set[str]:
    """Of the tensors in a safetensors file, from its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


# ---- the assets


@EACH
def test_it_is_small_holds_no_pickle_and_is_found_by_its_bare_name(name):
    folder = ROOT / "assets" / name
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md"}
    assert resolve_path(name) == str(folder)
    if name == "tiny-sd":
        assert dtypes(folder / "unet" / "diffusion_pytorch_model.safetensors") == {"F16"}


@EACH
def test_its_parts_are_those_of_its_family_in_float32_once_loaded(name):
    own = pipe(name)
    parts = (own.unet if name == "tiny-sd" else own.transformer, own.vae, own.text_encoder)
    assert [type(part).__name__ for part in parts] == PARTS[name]
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}


def test_the_schedulers_are_those_of_sd_and_wan():
    """Eps prediction on SD 1.5's betas, DDIM with its settings, no safety checker asked for."""
    facts = pipe("tiny-sd").scheduler.config
    assert type(pipe("tiny-sd").scheduler).__name__ == "DDIMScheduler"
    own = {"prediction_type": "epsilon", "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    own |= {"num_train_timesteps": 1000, "timestep_spacing": "leading", "steps_offset": 1}
    own |= dict.fromkeys(("set_alpha_to_one", "clip_sample", "thresholding"), False)
    assert {name: facts[name] for name in own} == own
    assert pipe("tiny-sd").safety_checker is None
    assert not pipe("tiny-sd").config.requires_safety_checker
    assert type(pipe("tiny-wan").scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert pipe("tiny-wan").scheduler.config.shift == 3.0


@EACH
def test_a_plain_call_gives_what_is_recorded(name):
    """From the same noise, SD's by 50 steps with CFG 7.5; block means may differ by rounding."""
    wanted = record(name)["fingerprint"]
    if name != "tiny-sd":
        found = (fingerprint if name == "tiny-wan" else kontext_stages.fingerprint)(pipe(name))
    else:
        generator = torch.Generator().manual_seed(wanted["seed"])
        image = pipe(name)(wanted["prompt"], output_type="np", generator=generator).images[0]
        assert image.shape == (32, 32, 3)
        found = image.transpose(2, 0, 1).reshape(3, 4, 8, 4, 8).mean(axis=(2, 4))
    assert np.asarray(wanted["blocks"]).std() > 0.05  # not empty
    np.testing.assert_allclose(found, wanted["blocks"], rtol=0, atol=0.01)


def test_the_vae_of_sd_needs_no_shift_and_keeps_pictures():
    """Latents are standard by the scale alone, which is all that the pipeline undoes when it decodes."""
    vae = pipe("tiny-sd").vae
    assert vae.config.shift_factor is None
    rng = np.random.default_rng(0)
    scenes = [shapes.parse(caption) for caption in shapes.prompts("heldout")[:96]]
    pictures = torch.from_numpy(np.stack([shapes.draw(scene, rng) for scene in scenes]))
    with torch.no_grad():
        latents = vae.encode(pictures * 2 - 1).latent_dist.mean * vae.config.scaling_factor
        decoded = vae.decode(latents / vae.config.scaling_factor).sample / 2 + 0.5
    assert abs(float(latents.mean())) < 0.05
    assert float(latents.std()) == pytest.approx(1, abs=0.05)
    hits = [score_scene(s, detect(i))[0] for s, i in zip(scenes, decoded.clamp(0, 1).numpy(), strict=True)]
    assert np.mean(hits) > 0.97


def test_the_tokenizer_of_sd_has_the_words_of_the_world_and_spells_others():
    own = pipe("tiny-sd")
    pieces = own.tokenizer.tokenize("two red circles left of a dog")
    assert pieces == ["two</w>", "red</w>", "circles</w>", "left</w>", "of</w>", "a</w>", "d", "o", "g</w>"]
    assert own.tokenizer.model_max_length == own.text_encoder.config.max_position_embeddings == 12


# ---- the records


def test_the_record_of_sd_is_of_the_scripts_settings():
    """Seed 0 on two processes, and the calls that the script reports; the lab's leaves something to learn."""
    model, own = MODELS["tiny-sd"], record("tiny-sd")
    options = {"cycles": model.cycles, "vae_from": VAE_FROM["tiny-sd"]}
    settings = Settings(seed=0, processes=2, output=ROOT / "assets" / "tiny-sd", **options)
    assert own["settings"] == json.loads(json.dumps(settings.facts()))
    assert list(own["strict"]) == list(model.calls)
    assert 0.30 <= own["strict"][next(iter(model.calls))]["all"] <= 0.65


def test_the_record_of_wan_is_of_the_scripts_settings():
    """Seed 0 on two processes; CFG helps, what is rendered comes through the VAE, and there is something to learn."""
    settings, own = wan_settings(parse(["tiny-wan"])), record("tiny-wan")
    told = {stage: settings.facts(stage) for stage in ("vae", "denoiser")}
    assert own["settings"] == json.loads(json.dumps(told))
    assert list(own["strict"]) == list(wan.MODEL.calls)
    alone, guided = (own["strict"][name]["all"] for name in ("10 steps, no CFG", "10 steps, CFG 2"))
    assert 0.25 <= alone <= 0.55
    assert guided > alone
    assert own["vae_strict"]["all"] >= 0.95


def test_the_record_of_kontext_is_of_the_scripts_settings():
    """Seed 0 in one process; every operation is learned in part, and sources are not handed back."""
    settings, own = kontext_settings(parse(["tiny-kontext"])), record("tiny-kontext")
    assert own["settings"] == json.loads(json.dumps(settings.facts() | {"done": settings.steps}))
    assert list(own["strict"]) == list(kontext.MODEL.calls)
    found = own["strict"]["6 steps, no CFG"]
    assert 0.25 <= found["strict"] <= 0.55
    assert found["unchanged"] <= 0.05
    assert min(found[name] for name in settings.operations) >= 0.05


@pytest.mark.slow
def test_the_accuracy_of_kontext_is_the_recorded_one():
    """The lab's steps on as many held-out edits from the same noise; rounding may turn a few of them."""
    own, (call, _) = record("tiny-kontext"), kontext.MODEL.calls["6 steps, no CFG"]
    operations = tuple(own["settings"]["operations"])
    found = kontext_stages.strict_accuracy(pipe("tiny-kontext"), own["pairs"], operations, **call)
    assert found["strict"] == pytest.approx(own["strict"]["6 steps, no CFG"]["strict"], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-sd", "tiny-wan"])
def test_its_accuracy_is_the_recorded_one(name):
    """The lab's call on all held-out captions from the same noise; rounding may turn a few of them."""
    model = MODELS[name] if name == "tiny-sd" else wan.MODEL
    call_name, (call, _) = next(iter(model.calls.items()))
    captions = 512 if name == "tiny-sd" else record(name)["captions"]
    measured = (report.strict_accuracy if name == "tiny-sd" else strict_accuracy)(pipe(name), captions, **call)["all"]
    assert measured == pytest.approx(record(name)["strict"][call_name]["all"], abs=0.02)
    if name == "tiny-wan":
        assert vae_strict(pipe(name).vae, 0, 250)["all"] >= 0.95
