"""The FLUX adapter against its pipeline and the generic adapter, its LoRA, and the shape of the real FLUX.1-dev."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxPipeline
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import SampleId
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import window
from flowrl.diffusion.schedules import shifted_linspace
from flowrl.models import flux
from flowrl.models.base import LoraSettings, packed_grid
from flowrl.models.weights import Weights
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.recorder import Recording
from flowrl.rollout.saliency_maps import mapper
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import flow_sde
from tests import native
from tests import tiny_pipelines as tiny
from tests.tiny_sd3 import ROOT

DEV = ROOT / "assets" / "model_configs" / "flux1-dev"
SIZES = [(16, 16), (24, 16)]
TRUE_CFG = {"true_cfg_scale": 3.0, "negative_prompt": "blue"}


def adapter(size: tuple[int, int] = SIZES[0], **options) -> flux.Flux:
    return native.adapter("flux", tiny.make("flux"), size, **options)


# ---- the adapter is the pipeline


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("true_cfg", [{}, TRUE_CFG])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.5])
def test_the_euler_plan_reproduces_the_pipelines_own_call(batch, size, true_cfg, guidance_scale):
    pipe = tiny.make("flux")
    model = native.adapter("flux", pipe, size, **true_cfg)
    native.compare(model, pipe, size, batch, guidance_scale, guidance_scale=guidance_scale, **true_cfg)


@pytest.mark.parametrize("true_cfg", [{}, TRUE_CFG])
def test_its_prediction_is_the_generic_adapters(true_cfg):
    pipe = tiny.make("flux")
    model, generic = native.adapter("flux", pipe, SIZES[1], **true_cfg), native.beside(pipe, SIZES[1], **true_cfg)
    assert_close(native.output(model, 3.5), native.output(generic, 3.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("true_cfg", [{}, TRUE_CFG])
def test_every_sample_has_its_own_timestep(true_cfg):
    model = adapter(**true_cfg)
    assert_close(native.output(model, 3.5), native.apart(model, 3.5), atol=1e-5, rtol=1e-5)


def test_the_embedded_guidance_costs_no_forward_and_is_seen():
    model = adapter()
    assert not torch.allclose(native.output(model, 3.5), native.output(model, 1.0), atol=1e-4)
    assert [model.branches(scale) for scale in (1.0, 3.5)] == [1, 1]
    assert adapter(**TRUE_CFG).branches(1.0) == 2


def test_true_cfg_before_encoding_says_what_to_do():
    model, cond = adapter(**TRUE_CFG), adapter().encode(["a red circle"])
    with pytest.raises(ModelError, match=r"call encode\(\) first"):
        model.predict(torch.zeros(1, *model.latent_shape()), torch.ones(1), cond, 3.5)
    model.free_text_encoders()
    with pytest.raises(ModelError, match="encoders were freed"):
        model.encode(["a red circle"])


def test_the_shapes_of_a_condition_are_known_without_encoding():
    model = adapter()
    cond = model.encode(native.PROMPTS)
    assert {name: tuple(value.shape[1:]) for name, value in cond.tensors.items()} == model.condition_shapes()


def test_a_static_shift_takes_the_place_of_the_schedulers():
    own, fixed = adapter().schedule(7), adapter(shift=3.0).schedule(7)
    assert torch.equal(fixed.sigmas, shifted_linspace(7, 3.0))
    assert not torch.allclose(own.sigmas, fixed.sigmas, atol=1e-2)
    assert_close(fixed.timesteps, 1000 * fixed.sigmas[:-1])


# ---- LoRA


def test_every_lora_matrix_is_trained_and_the_replay_is_exact():
    model = adapter()
    weights = native.lora(model)
    assert native.backward(model, weights, 3.5) == 0
    adapted = {name.partition(".lora_")[0] for name in weights.parameters}
    assert native.trained(weights, "lora_B") == adapted
    for target in flux.LORA_TARGETS:
        assert any(name.endswith(target) for name in adapted)


def test_it_trains_in_bfloat16():
    native.trains_in_bfloat16("flux", "flux", SIZES[0], 3.5)


def test_a_saved_lora_gives_the_same_picture_in_a_plain_pipeline(tmp_path):
    pipe, plain = tiny.make("flux"), tiny.make("flux")
    model = native.adapter("flux", pipe, SIZES[0])
    native.lora(model, noise=0.3).save(tmp_path, FluxPipeline)
    noise, x0 = native.drawn(model, 2, 3.5, 2)
    before, _ = native.own_call(plain, SIZES[0], noise, 2, guidance_scale=3.5)
    plain.load_lora_weights(tmp_path)
    after, pictures = native.own_call(plain, SIZES[0], noise, 2, guidance_scale=3.5)
    assert not torch.allclose(before, after, atol=1e-3)
    assert_close(x0, after, atol=1e-5, rtol=0)
    assert_close(model.decode(x0), pictures, atol=1e-5, rtol=0)


def test_two_iterations_of_flow_grpo_on_a_saved_pipeline(tmp_path):
    summary = native.two_iterations(tmp_path, "flux", tiny.make("flux"), SIZES[0])
    assert (summary["status"], summary["iterations"]) == ("finished", 2)


# ---- positions of packed latents


def test_log_probs_and_maps_by_position_go_by_tokens():
    size = (24, 16)
    model = adapter(size)
    rows, columns = packed_grid(model)
    assert (rows, columns) == (6, 4)
    assert model.latent_shape() == (24, 16)
    policy = Policy(model, flow_sde.build(flow_sde.Config()), 3.5)
    ids, plan = [SampleId(0, 0), SampleId(1, 0)], window(model.schedule(3), 0.7)
    noise, cond = Noise(0, "test", 1, model.latent_shape()), model.encode(native.PROMPTS)
    options = {"batch_size": 2, "options": RunOptions(recording=Recording("position"))}
    _, edges = run(policy, plan, noise, Asked(ids, cond, torch.arange(2)), **options)
    assert edges.old_log_prob.shape == (len(edges), rows * columns)
    _, plain = run(policy, plan, noise, Asked(ids, cond, torch.arange(2)), batch_size=2)
    assert_close(edges.old_log_prob.mean(dim=1), plain.old_log_prob)
    maps = mapper(SpatialConfig(), model.latent_shape(), grid=packed_grid(model))
    pictures = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    unpacked = mapper(SpatialConfig(), (1, rows, columns))(pictures)
    assert torch.equal(maps(pictures), unpacked.reshape(2, -1))
    # Token by token, a position of the map is a 2 x 2 place of the latents.
    marked = torch.zeros(1, *model.latent_shape())
    marked[0, columns + 2] = 1
    latents = model.pipeline._unpack_latents(marked, *size, model.pipeline.vae_scale_factor)
    assert latents[0, 0, 2:4, 4:6].eq(1).all()
    assert latents.sum() == 16


def test_the_generic_adapter_has_the_same_grid():
    assert packed_grid(native.beside(tiny.make("flux"), (24, 16))) == (6, 4)


# ---- sizes and options


@pytest.mark.parametrize(("size", "near"), [(18, 16), (0, 4), (-4, 4), (23, 24)])
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_does(size, near):
    with pytest.raises(ModelError, match=rf"model\.width={size} must be a multiple of 4; use {near}$"):
        adapter((16, size))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_sequence_length": 513}, r"max_sequence_length=513 must be in 1\.\.512"),
        ({"shift": 0.0}, "shift=0.0 must be positive"),
        ({"true_cfg_scale": 0.5}, "true_cfg_scale=0.5 must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        flux.Config(path="x", **option)


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is no pipeline folder"):
        flux.build(flux.Config(path=str(tmp_path)))


# ---- the real shape


@pytest.fixture(scope="module")
def real() -> flux.Flux:
    return flux.skeleton(flux.Config(path="any", dtype="bfloat16", height=512, width=512), DEV)


def test_the_real_shape_is_the_published_one(real):
    parts = {k: p for k, p in real.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()} == {
        "transformer": 11_901_408_320,
        "vae": 83_819_683,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
    }
    assert real.latent_shape() == (1024, 64)
    assert real.condition_shapes() == {"prompt_embeds": (512, 4096), "pooled": (768,)}
    # grpo_family sheet 0.3.
    assert_close(
        real.schedule(6).sigmas, torch.tensor([1, 0.90374, 0.7897, 0.65249, 0.48422, 0.273, 0]), atol=1e-5, rtol=0
    )
    with torch.device("meta"):
        weights = Weights(real.network, LoraSettings(rank=64, alpha=128), real.lora_targets, seed=0)
    assert len(weights.parameters) == 2 * (19 * 12 + 38 * 3)
