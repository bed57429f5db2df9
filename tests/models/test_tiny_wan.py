"""assets/tiny-wan: a WanPipeline that loads plainly and draws what its record says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.models.pipelines.paths import resolve_path
from scripts.pretraining import wan
from scripts.pretraining.__main__ import parse, wan_settings
from scripts.pretraining.wan_stages import fingerprint, strict_accuracy, vae_strict
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "assets" / "tiny-wan"
LIMIT = 12_000_000
RECORD: dict[str, Any] = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pipe() -> Any:
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline

    loaded = WanPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_it_is_small_holds_no_pickle_and_is_found_by_its_bare_name():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} <= {".safetensors", ".json"}
    assert resolve_path("tiny-wan") == str(FOLDER)


def test_its_parts_are_those_of_wan(pipe):
    """Float32 once loaded."""
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder)
    assert [type(part).__name__ for part in parts] == ["WanTransformer3DModel", "AutoencoderKLWan", "UMT5EncoderModel"]
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert pipe.scheduler.config.shift == 3.0


def test_a_plain_call_gives_the_recorded_video(pipe):
    """The lab's call from the same noise; block means may differ by rounding."""

    found, wanted = fingerprint(pipe), RECORD["fingerprint"]["blocks"]
    assert np.asarray(wanted).std() > 0.05  # not an empty video
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.01)


def test_the_record_is_of_the_scripts_settings_and_leaves_something_to_learn():
    """Seed 0 on two processes; CFG helps, and what is rendered comes through the VAE."""

    settings = wan_settings(parse(["tiny-wan"]))
    told = {stage: settings.facts(stage) for stage in ("vae", "denoiser")}
    assert RECORD["settings"] == json.loads(json.dumps(told))
    assert list(RECORD["strict"]) == list(wan.MODEL.calls)
    alone, guided = (RECORD["strict"][name]["all"] for name in ("10 steps, no CFG", "10 steps, CFG 2"))
    assert 0.25 <= alone <= 0.55
    assert guided > alone
    assert RECORD["vae_strict"]["all"] >= 0.95


@pytest.mark.slow
def test_its_accuracy_is_the_recorded_one(pipe):
    """The lab's call on all held-out captions from the same noise; rounding may turn a few of them."""

    name, (call, _) = next(iter(wan.MODEL.calls.items()))
    measured = strict_accuracy(pipe, RECORD["captions"], **call)["all"]
    assert measured == pytest.approx(RECORD["strict"][name]["all"], abs=0.02)
    assert vae_strict(pipe.vae, 0, 250)["all"] >= 0.95
