"""The Wan adapter against its pipeline and the generic adapter, its two experts, and the shape of the real Wan2.1."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanPipeline
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.models import wan
from tests import native
from tests import tiny_pipelines as tiny
from tests.tiny_sd3 import ROOT

REAL = ROOT / "assets" / "model_configs" / "wan21-t2v-1.3b"
SIZES = [(16, 16), (32, 16)]
CLIP = {"num_frames": 9}


def adapter(case: str = "wan", size: tuple[int, int] = SIZES[0], **options) -> wan.Wan:
    return native.adapter("wan", tiny.make(case), size, **(CLIP | options))


# ---- the adapter is the pipeline


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_the_euler_plan_reproduces_the_pipelines_own_call(batch, size, guidance_scale):
    pipe = tiny.make("wan")
    model = native.adapter("wan", pipe, size, **CLIP)
    native.compare(model, pipe, size, batch, guidance_scale, guidance_scale=guidance_scale, **CLIP)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("second", [None, 2.0])
def test_two_experts_with_their_own_guidance_are_the_pipelines(guidance_scale, second):
    pipe = tiny.make("wan_2_2")
    model = native.adapter("wan", pipe, SIZES[0], guidance_scale_2=second, **CLIP)
    times = model.schedule(4).timesteps
    assert (times >= model.boundary).any()
    assert (times < model.boundary).any()
    options = {"guidance_scale": guidance_scale, "guidance_scale_2": second}
    native.compare(model, pipe, SIZES[0], 2, guidance_scale, **options, **CLIP)


def test_a_timestep_for_every_token_is_the_pipelines():
    pipe = tiny.make("wan")
    pipe.register_to_config(expand_timesteps=True)
    model = native.adapter("wan", pipe, SIZES[0], **CLIP)
    native.compare(model, pipe, SIZES[0], 2, 4.0, guidance_scale=4.0, **CLIP)


def test_one_frame_is_a_picture():
    pipe = tiny.make("wan")
    model = native.adapter("wan", pipe, SIZES[0], num_frames=1)
    native.compare(model, pipe, SIZES[0], 2, 4.0, guidance_scale=4.0, num_frames=1)
    assert model.decode(torch.zeros(2, *model.latent_shape())).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("case", ["wan", "wan_2_2"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_its_prediction_is_the_generic_adapters(case, guidance_scale):
    pipe = tiny.make(case)
    model, generic = native.adapter("wan", pipe, SIZES[1], **CLIP), native.beside(pipe, SIZES[1], **CLIP)
    assert torch.equal(model.schedule(4).timesteps, generic.schedule(4).timesteps)
    assert torch.equal(model.schedule(4).sigmas, generic.schedule(4).sigmas)
    assert_close(native.output(model, guidance_scale), native.output(generic, guidance_scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["wan", "wan_2_2"])
def test_every_sample_has_its_own_timestep_and_expert(case):
    model = adapter(case)
    assert_close(native.output(model, 4.0), native.apart(model, 4.0), atol=1e-5, rtol=1e-5)
    assert (model.batch_key(0) == model.batch_key(3)) == (case == "wan")


def test_a_shift_takes_the_place_of_the_schedulers():
    own, other = adapter().schedule(5).sigmas, adapter(shift=8.0).schedule(5).sigmas
    assert bool((other[1:-1] > own[1:-1]).all())
    assert torch.equal(adapter(shift=3.0).schedule(5).sigmas, own)
    assert torch.equal(adapter("wan_2_2", shift=3.0).schedule(5).sigmas, adapter("wan_2_2").schedule(5).sigmas)


# ---- LoRA


@pytest.mark.parametrize("case", ["wan", "wan_2_2"])
def test_every_lora_matrix_is_trained_and_the_replay_is_exact(case):
    model = adapter(case)
    weights = native.lora(model)
    assert native.backward(model, weights, 4.0, steps=5) == 0
    assert native.trained(weights, "lora_B") == {name.partition(".lora_")[0] for name in weights.parameters}


def test_it_trains_in_bfloat16():
    native.trains_in_bfloat16("wan", "wan", SIZES[0], 4.0, **CLIP)


@pytest.mark.parametrize("case", ["wan", "wan_2_2"])
def test_a_saved_lora_gives_the_same_clip_in_a_plain_pipeline(tmp_path, case):
    pipe, plain = tiny.make(case), tiny.make(case)
    model = native.adapter("wan", pipe, SIZES[0], **CLIP)
    native.lora(model, noise=0.3).save(tmp_path, WanPipeline)
    noise, x0 = native.drawn(model, 2, 4.0, 3)
    before, _ = native.own_call(plain, SIZES[0], noise, 3, guidance_scale=4.0, **CLIP)
    plain.load_lora_weights(tmp_path)
    if case == "wan_2_2":
        plain.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    after, clips = native.own_call(plain, SIZES[0], noise, 3, guidance_scale=4.0, **CLIP)
    assert not torch.allclose(before, after, atol=1e-3)
    assert_close(x0, after, atol=1e-5, rtol=0)
    assert_close(model.decode(x0), clips, atol=1e-5, rtol=0)


def test_two_iterations_of_flow_grpo_on_a_saved_pipeline(tmp_path):
    # One frame, since the reward looks at pictures.
    summary = native.two_iterations(tmp_path, "wan", tiny.make("wan"), SIZES[0], num_frames=1)
    assert (summary["status"], summary["iterations"]) == ("finished", 2)


# ---- sizes and options


@pytest.mark.parametrize(("size", "near"), [(24, 32), (0, 16), (-16, 16), (23, 16)])
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_does(size, near):
    with pytest.raises(ModelError, match=rf"model\.width={size} must be a multiple of 16; use {near}$"):
        adapter(size=(16, size))


@pytest.mark.parametrize(("frames", "near"), [(8, 9), (0, 1), (-3, 1), (6, 5)])
def test_frames_that_do_not_fit_are_refused(frames, near):
    with pytest.raises(ModelError, match=rf"model\.num_frames={frames} must be one more .* of 4; use {near}$"):
        adapter(num_frames=frames)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"max_sequence_length=513 must be in 1\.\.512"):
        wan.Config(path="x", max_sequence_length=513)
    with pytest.raises(ValueError, match=r"guidance_scale_2=0\.5 must be at least 1"):
        wan.Config(path="x", guidance_scale_2=0.5)
    with pytest.raises(ModelError, match=r"guidance_scale_2=2\.0: this model has no second expert"):
        adapter(guidance_scale_2=2.0)
    pipe = tiny.make("wan")
    pipe.transformer.register_to_config(in_channels=36)
    with pytest.raises(ModelError, match="takes 36 channels, not the 16 of its latents"):
        native.adapter("wan", pipe, SIZES[0], **CLIP)
    model = adapter()
    model.pipeline.scheduler.register_to_config(use_flow_sigmas=False, prediction_type="epsilon")
    with pytest.raises(ModelError, match="set use_flow_sigmas"):
        model.schedule(4)


# ---- the real shape


def test_the_real_shape_is_the_published_one():
    config = wan.Config(path="any", dtype="bfloat16", height=240, width=416, num_frames=33)
    real = wan.skeleton(config, REAL)
    parts = {k: p for k, p in real.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()} == {
        "transformer": 1_418_996_800,
        "vae": 126_892_531,
        "text_encoder": 5_680_910_336,
    }
    assert real.latent_shape() == (16, 9, 30, 52)
    assert real.condition_shapes() == {"prompt_embeds": (512, 4096)}
