"""The generic adapter beyond parity: bad input by name, prompts of any length, grids of multistep schedulers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
)
from torch import nn
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.models import generic
from flowrl.models._schedulers import path_of, plain
from flowrl.models.base import LoraSettings
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.encoding import learn, rows_of
from flowrl.models.weights import Weights
from tests import tiny_pipelines as tiny
from tests import tiny_sd3
from tests.contracts.test_models import adapter, noise_like
from tests.native import drawn, lora

CALL = {"max_sequence_length": tiny.TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3.save(tmp_path_factory.mktemp("tiny"))


def around(name: str, made: Any, **options: Any) -> Generic:
    """An adapter around a pipeline that the test has changed."""
    height, width = tiny.CASES[name].sizes[0]
    options = {"height": height, "width": width, "call": tiny.CASES[name].call} | options
    return Generic(made, Config(path="tiny", **options))


# ---- from a folder


def test_a_folder_becomes_an_adapter_of_its_own_class(folder):
    model = generic.build(Config(path=str(folder), call=CALL))
    assert model.kind == "StableDiffusion3Pipeline"
    assert isinstance(model.process, FlowProcess)
    assert (model.height, model.width) == (32, 32)
    assert next(model.pipeline.vae.parameters()).dtype == torch.float32


def test_bfloat16_keeps_the_vae_and_the_trained_weights_in_float32(folder):
    model = generic.build(Config(path=str(folder), dtype="bfloat16", call=CALL))
    weights, cond = lora(model), model.encode(tiny.PROMPTS)
    prediction = model.predict(noise_like(model), torch.tensor([900.0, 300.0]), cond, 4.0)
    prediction.float().square().sum().backward()
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}
    assert {p.dtype for p in model.network.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert next(model.pipeline.vae.parameters()).dtype == torch.float32
    assert model.decode(noise_like(model)).dtype == torch.float32
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in weights.parameters.values())


def test_a_folder_that_is_no_pipeline_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"is not a pipeline folder: it has no model_index\.json; give the folder that"
    ):
        generic.build(Config(path=str(tmp_path)))


def test_a_missing_component_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    shutil.rmtree(broken / "vae")
    with pytest.raises(ModelError, match="names 'vae', but there is no folder 'vae'; copy the whole pipeline"):
        generic.build(Config(path=str(broken)))
    index = json.loads((broken / "model_index.json").read_text())
    (broken / "model_index.json").write_text(json.dumps(index | {"vae": [None, None]}))
    with pytest.raises(ModelError, match=r"needs its component 'vae', which this model leaves out"):
        generic.build(Config(path=str(broken)))


# ---- what cannot be entered


def test_a_scheduler_that_is_neither_flow_nor_vp_is_refused_with_what_to_use():
    made = tiny.make("sd3")
    made.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(ModelError, match="load the pipeline with FlowMatchEulerDiscreteScheduler"):
        around("sd3", made)
    made.scheduler = None
    with pytest.raises(ModelError, match="needs its component 'scheduler'"):
        around("sd3", made)
    made.scheduler = type("Odd", (), {"config": {}})()
    with pytest.raises(ModelError, match=r"scheduler Odd has no step\(\)"):
        around("sd3", made)


def test_a_pipeline_without_the_parts_of_a_re_entry_is_refused_with_the_reason():
    made = tiny.make("sd3")
    made.prepare_latents = None
    with pytest.raises(ModelError, match=r"has no prepare_latents\(\): .*native adapter"):
        around("sd3", made)
    made = tiny.make("sd3")
    made.transformer = None
    with pytest.raises(ModelError, match="has no denoiser under the names transformer, transformer_2, unet"):
        around("sd3", made)


def test_an_unknown_class_is_probed_and_works(monkeypatch):
    made = tiny.make("z_image")
    made.__class__ = type("LastWeeksPipeline", (type(made),), {})
    model = around("z_image", made)
    x, cond = noise_like(model), model.encode(tiny.PROMPTS)
    t = torch.tensor([900.0, 300.0])
    assert model.batch_key(3) == 0
    expected = adapter("z_image").predict(x, t, cond, 3.0)
    assert_close(model.predict(x, t, cond, 3.0), expected, atol=1e-6, rtol=1e-5)


def test_an_unknown_class_whose_samples_see_each_others_timestep_is_predicted_step_by_step():
    made = tiny.make("sd3")

    class Odd(type(made)):
        pass

    made.__class__ = Odd
    forward = made.transformer.forward

    def strange(*args: Any, timestep: Any, **kwargs: Any) -> Any:
        return forward(*args, timestep=timestep.mean().expand(len(timestep)), **kwargs)

    made.transformer.forward = strange
    model = around("sd3", made)
    assert model.batch_key(3) == 3
    x, cond, t = noise_like(model), model.encode(tiny.PROMPTS), torch.tensor([900.0, 300.0])
    alone = [model.predict(x[k : k + 1], t[k : k + 1], cond.index(torch.tensor([k])), 1.0) for k in (0, 1)]
    assert_close(model.predict(x, t, cond, 1.0), torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"num_frame": 9}, r"model\.call\.num_frame: WanPipeline takes no such argument; did you mean 'num_frames'"),
        ({"height": 16}, r"model\.call\.height is not to be set: model\.height decides it"),
        ({"guidance_scale": 3}, r"rollout\.guidance_scale decides it"),
        ({"prompt_embeds": None}, "takes no such argument"),
    ],
)
def test_a_wrong_argument_of_the_call_is_named(call, message):
    with pytest.raises(ModelError, match=message):
        around("wan", tiny.make("wan"), call=call)


def test_an_argument_that_needs_the_number_of_the_step_is_refused():
    with pytest.raises(ModelError, match=r"skip_guidance_layers: .* depends on the step's number"):
        around("sd3", tiny.make("sd3"), call={"skip_guidance_layers": [0]})


@pytest.mark.parametrize(("name", "height", "near"), [("flux", 18, 16), ("wan", 24, 32), ("sd", 15, 16)])
def test_a_size_that_the_vae_cannot_divide_is_refused_with_the_nearest(name, height, near):
    with pytest.raises(ModelError, match=rf"model\.height={height} must be a multiple of \d+; use {near}"):
        around(name, tiny.make(name), height=height)


def test_lora_targets_that_match_nothing_are_named():
    model = adapter("flux")
    with pytest.raises(ModelError, match=r"binds to no module of FluxTransformer2DModel"):
        Weights(model.network, LoraSettings(rank=2, alpha=2, targets=["nowhere"]), model.lora_targets, seed=0)


def test_prompts_that_are_cut_off_alike_are_refused():
    made = tiny.make("lumina_2")
    with pytest.raises(ModelError, match=r"two different prompts have the same embedding: .*max_sequence_length"):
        around("lumina_2", made, call=CALL).latent_shape()


# ---- schedulers


def test_the_grid_of_a_multistep_flow_scheduler_is_kept():
    made = tiny.make("sana")
    made.scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    model = around("sana", made)
    made.scheduler.set_timesteps(6)
    assert torch.equal(model.schedule(6).sigmas, made.scheduler.sigmas.float())
    _, x0 = drawn(model, 1, 1.0, 4)
    assert x0.isfinite().all()


@pytest.mark.parametrize("kind", [PNDMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler, DDIMScheduler])
def test_a_vp_scheduler_becomes_ddim_of_the_same_betas(kind):
    made = tiny.make("sd")
    options = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    made.scheduler = kind(timestep_spacing="leading", steps_offset=1, **options)
    model = around("sd", made)
    assert isinstance(model.process, VPProcess)
    assert model.prediction_type == "eps"
    assert type(made.scheduler) is DDIMScheduler
    assert not made.scheduler.config.clip_sample
    grid = model.schedule(10)
    assert grid.timesteps.tolist() == [901, 801, 701, 601, 501, 401, 301, 201, 101, 1]
    assert_close(grid.sigmas[:-1].square(), 1 - made.scheduler.alphas_cumprod[grid.timesteps.long()])


@pytest.mark.parametrize(
    ("kind", "spacing", "to_one"),
    [
        (EulerDiscreteScheduler, "linspace", True),
        (PNDMScheduler, "leading", False),
        (DPMSolverMultistepScheduler, "linspace", True),
        (LCMScheduler, "leading", True),
    ],
)
def test_what_a_vp_schedulers_class_decides_by_itself_is_kept(kind, spacing, to_one):
    own = kind()
    made = plain(own, path_of(own))
    assert (made.config.timestep_spacing, made.config.set_alpha_to_one) == (spacing, to_one)
    assert torch.equal(made.betas, own.betas)
    assert not made.config.clip_sample


def test_the_log_names_the_grid_that_takes_the_place_of_karras_sigmas(caplog):
    own = EulerDiscreteScheduler(use_karras_sigmas=True, steps_offset=1)
    with caplog.at_level("INFO", logger="flowrl"):
        plain(own, path_of(own))
    assert "grid: DDIM's of spacing 'linspace' and offset 1, without use_karras_sigmas" in caplog.text


def test_an_inverted_schedule_falls_and_its_velocity_is_turned_round():
    model = adapter("mochi")
    grid = model.schedule(4)
    assert grid.sigmas[0] == 1
    assert grid.sigmas[-1] == 0
    assert bool((grid.timesteps.diff() > 0).all())


def test_entering_leaves_the_pipeline_as_it_was():
    model = adapter("sd3")
    pipe = model.pipeline
    before = (pipe.scheduler, pipe.encode_prompt, pipe.prepare_latents, dict(pipe.config))
    state = torch.get_rng_state()
    cond = model.encode(tiny.PROMPTS)
    model.predict(noise_like(model), torch.tensor([900.0, 300.0]), cond, 3.0)
    model.decode(noise_like(model))
    assert (pipe.scheduler, pipe.encode_prompt, pipe.prepare_latents, dict(pipe.config)) == before
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler
    assert not pipe.transformer._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), state)


# ---- experts


def test_two_experts_each_predict_their_own_steps():
    model = adapter("wan_2_2")
    weights = lora(model)
    assert {name.split(".")[0] for name in weights.parameters} == {"transformer", "transformer_2"}
    cond, x = model.encode(tiny.PROMPTS), noise_like(model)
    model.predict(x, torch.tensor([900.0, 900.0]), cond, 1.0).sum().backward()
    reached = {name.split(".")[0] for name, p in weights.parameters.items() if p.grad is not None}
    assert reached == {"transformer"}
    model.predict(x, torch.tensor([900.0, 300.0]), cond, 1.0).sum().backward()
    reached = {name.split(".")[0] for name, p in weights.parameters.items() if p.grad is not None}
    assert reached == {"transformer", "transformer_2"}
    with torch.no_grad(), weights.using("reference"):
        assert model.predict(x, torch.tensor([900.0, 300.0]), cond, 1.0).shape == x.shape


# ---- prompts


def test_prompts_of_different_lengths_share_a_batch_where_a_mask_travels_along():
    model = adapter("qwen_image")
    cond = model.encode([*tiny.PROMPTS, "a circle"])
    lengths = [len(row) for row in cond["0.0"]]
    assert len(set(lengths)) == 3
    assert len(model._groups([500.0] * 3, cond)) == 1
    x = noise_like(model, 3)
    with torch.no_grad():
        together = model.predict(x, torch.full((3,), 500.0), cond, 3.0)
        alone = [
            model.predict(x[k : k + 1], torch.tensor([500.0]), cond.index(torch.tensor([k])), 3.0) for k in range(3)
        ]
    assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_prompts_of_different_lengths_without_a_mask_are_predicted_apart():
    model = around("cogview_4", tiny.make("cogview_4"), call={"max_sequence_length": 64})
    cond = model.encode(["a red circle", " ".join(["a red circle"] * 8)])
    assert [len(row) for row in cond["0.0"]] == [16, 32]
    assert model._groups([500.0] * 2, cond) == [[0], [1]]
    x = noise_like(model)
    with torch.no_grad():
        together = model.predict(x, torch.full((2,), 500.0), cond, 3.0)
        alone = model.predict(x[1:], torch.tensor([500.0]), cond.index(torch.tensor([1])), 3.0)
    assert_close(together[1:], alone, atol=1e-6, rtol=1e-6)


def test_a_condition_of_lists_is_indexed_collated_and_moved():
    cond = Condition({"a": [torch.ones(2), torch.zeros(3)], "b": torch.arange(2.0)})
    assert len(cond) == 2
    assert cond.device == torch.device("cpu")
    picked = cond.index(torch.tensor([1, 0, 1]))
    assert [len(row) for row in picked["a"]] == [3, 2, 3]
    assert picked["b"].tolist() == [1, 0, 1]
    both = Condition.collate([cond, picked])
    assert [len(row) for row in both["a"]] == [2, 3, 3, 2, 3]
    assert both.to(torch.float64)["a"][0].dtype == torch.float64


def test_a_part_that_depends_on_the_prompts_without_rows_is_refused():
    def encode(prompts: list[str]) -> tuple[Any, ...]:
        length = max(len(prompt) for prompt in prompts)
        return ((torch.ones(len(prompts), 4) * len(prompts[0]), torch.arange(length)),)

    with pytest.raises(ModelError, match="depends on the prompts without one row per prompt"):
        learn(encode)


def test_rows_are_found_in_tensors_and_lists():
    assert len(rows_of(torch.zeros(3, 2), 3)) == 3
    assert rows_of(torch.zeros(2, 2), 3) is None
    assert len(rows_of([torch.zeros(2)] * 3, 3)) == 3
    assert rows_of(None, 3) is None
    assert rows_of(nn.Identity(), 3) is None
