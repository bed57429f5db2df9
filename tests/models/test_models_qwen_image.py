"""The Qwen-Image adapter against its pipeline and the generic adapter, its LoRA, and the shape of the real model."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImagePipeline
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.diffusion.schedules import shifted_linspace
from flowrl.models import qwen_image
from flowrl.models.base import packed_grid
from tests import native
from tests import tiny_pipelines as tiny
from tests.tiny_sd3 import ROOT

REAL = ROOT / "assets" / "model_configs" / "qwen-image"
SIZES = [(16, 16), (24, 16)]
# Of different lengths, so that a batch is padded.
assert len({len(prompt.split()) for prompt in native.PROMPTS}) == 2


def pipeline():
    return tiny.make("qwen_image")


def adapter(size: tuple[int, int] = SIZES[0], **options) -> qwen_image.QwenImage:
    return native.adapter("qwen_image", pipeline(), size, **options)


def call(guidance_scale: float) -> dict:
    negative = {"negative_prompt": ""} if guidance_scale > 1 else {}
    return {"true_cfg_scale": guidance_scale, **negative}


# ---- the adapter is the pipeline


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_the_euler_plan_reproduces_the_pipelines_own_call(batch, size, guidance_scale):
    pipe = pipeline()
    model = native.adapter("qwen_image", pipe, size)
    native.compare(model, pipe, size, batch, guidance_scale, **call(guidance_scale))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_its_prediction_is_the_generic_adapters(guidance_scale):
    pipe = pipeline()
    model, generic = native.adapter("qwen_image", pipe, SIZES[1]), native.beside(pipe, SIZES[1])
    assert_close(native.output(model, guidance_scale), native.output(generic, guidance_scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_a_sample_has_its_own_timestep_and_does_not_see_its_neighbours_padding(guidance_scale):
    model = adapter()
    assert_close(native.output(model, guidance_scale), native.apart(model, guidance_scale), atol=1e-5, rtol=1e-5)


def test_guidance_keeps_the_length_of_every_token():
    model = adapter()
    plain, guided = native.output(model, 1.0), native.output(model, 4.0)
    assert not torch.allclose(plain, guided, atol=1e-3)
    assert_close(plain.norm(dim=-1), guided.norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_embeddings_are_as_long_as_their_prompts_whatever_the_batch():
    model = adapter()
    together = model.encode([*native.PROMPTS] * 5)["prompt_embeds"]
    alone = [model.encode([prompt])["prompt_embeds"][0] for prompt in native.PROMPTS]
    assert len({len(row) for row in alone}) == 2
    assert max(map(len, alone)) <= tiny.TOKENS
    for place, row in enumerate(together):
        assert_close(row, alone[place % 2], atol=1e-6, rtol=1e-5)


def test_a_static_shift_takes_the_place_of_the_schedulers():
    assert torch.equal(adapter(shift=3.0).schedule(5).sigmas, shifted_linspace(5, 3.0))
    assert float(adapter().schedule(5).sigmas[-2]) == pytest.approx(0.02, abs=1e-6)


# ---- LoRA


def test_every_lora_matrix_but_the_dead_ones_is_trained_and_the_replay_is_exact():
    model = adapter()
    weights = native.lora(model)
    assert native.backward(model, weights, 4.0) == 0
    adapted = {name.partition(".lora_")[0] for name in weights.parameters}
    assert set(model.dead_lora_modules()) < adapted
    assert native.trained(weights, "lora_B") == adapted - set(model.dead_lora_modules())


def test_it_trains_in_bfloat16():
    native.trains_in_bfloat16("qwen_image", "qwen_image", SIZES[0], 4.0)


def test_a_saved_lora_gives_the_same_picture_in_a_plain_pipeline(tmp_path):
    pipe, plain = pipeline(), pipeline()
    model = native.adapter("qwen_image", pipe, SIZES[0])
    native.lora(model, noise=0.3).save(tmp_path, QwenImagePipeline)
    noise, x0 = native.drawn(model, 2, 4.0, 2)
    before, _ = native.own_call(plain, SIZES[0], noise, 2, **call(4.0))
    plain.load_lora_weights(tmp_path)
    after, pictures = native.own_call(plain, SIZES[0], noise, 2, **call(4.0))
    assert not torch.allclose(before, after, atol=1e-3)
    assert_close(x0, after, atol=1e-5, rtol=0)
    assert_close(model.decode(x0), pictures, atol=1e-5, rtol=0)


def real_encoder(pipe) -> None:
    """A tiny language model of the real class: the stand-in of the tiny pipelines cannot be saved."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 512, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    pipe.register_modules(text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval())


def test_two_iterations_of_flow_grpo_on_a_saved_pipeline(tmp_path):
    pipe = pipeline()
    real_encoder(pipe)
    # The real template's words come before a prompt's, and are cut off by number.
    summary = native.two_iterations(tmp_path, "qwen_image", pipe, SIZES[0], max_sequence_length=64)
    assert (summary["status"], summary["iterations"]) == ("finished", 2)


# ---- sizes and options


@pytest.mark.parametrize(("size", "near"), [(18, 16), (0, 4), (-4, 4), (23, 24)])
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_does(size, near):
    with pytest.raises(ModelError, match=rf"model\.height={size} must be a multiple of 4; use {near}$"):
        adapter((size, 16))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"max_sequence_length": 1025}, r"must be in 1\.\.1024"), ({"shift": -1.0}, "shift=-1.0 must be positive")],
)
def test_options_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        qwen_image.Config(path="x", **option)


def test_its_tokens_have_a_place_in_the_picture():
    model = adapter(SIZES[1])
    assert packed_grid(model) == (6, 4)
    assert model.latent_shape() == (24, 16)


# ---- the real shape


def test_the_real_shape_is_the_published_one():
    real = qwen_image.skeleton(qwen_image.Config(path="any", dtype="bfloat16", height=512, width=512), REAL)
    parts = {k: p for k, p in real.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()} == {
        "transformer": 20_430_401_088,
        "vae": 126_892_531,
        "text_encoder": 8_292_166_656,
    }
    assert real.latent_shape() == (1024, 64)
    assert real.condition_shapes() == {"prompt_embeds": (512, 3584)}
    assert len(real.dead_lora_modules()) == 4
