"""The generic adapter beyond parity: bad input by name, prompts of any length, grids of multistep schedulers."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_map_euler_discrete import FlowMapEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_lcm import LCMScheduler
from diffusers.schedulers.scheduling_piflow import PiflowScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.models import generic
from flowrl.models._schedulers import path_of, plain
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.encoding import learn
from tests import tiny_pipelines as tiny
from tests.contracts.test_models import noise_like
from tests.native import drawn, lora
from tests.native import entered as adapter
from tests.tables import table

CALL = {"max_sequence_length": tiny.TOKENS}


def around(name: str, made: Any, **options: Any) -> Generic:
    """An adapter around a pipeline that the test has changed."""
    return adapter(name, pipe=made, **options)


# ---- from a folder


def test_a_folder_becomes_an_adapter_whose_vae_and_trained_weights_stay_in_float32(folder):
    model = generic.build(Config(path=str(folder), dtype="bfloat16", call=CALL))
    assert (model.kind, model.height, model.width) == ("StableDiffusion3Pipeline", 32, 32)
    assert isinstance(model.process, FlowProcess)
    weights, cond = lora(model), model.encode(tiny.PROMPTS)
    prediction = model.predict(noise_like(model), torch.tensor([900.0, 300.0]), cond, 4.0)
    prediction.float().square().sum().backward()
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}
    assert {p.dtype for p in model.network.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert next(model.pipeline.vae.parameters()).dtype == torch.float32
    assert model.decode(noise_like(model)).dtype == torch.float32
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in weights.parameters.values())


# ---- what cannot be entered


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("prepare_latents", r"has no prepare_latents\(\): .*native adapter"),
        ("transformer", "has no denoiser under the names transformer, transformer_2, unet"),
    ],
)
def test_a_pipeline_without_the_parts_of_a_re_entry_is_refused_with_the_reason(part, message):
    made = tiny.make("sd3")
    setattr(made, part, None)
    with pytest.raises(ModelError, match=message):
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
    ("name", "call", "message"),
    table(__file__, "refused_arguments"),
)
def test_a_wrong_argument_of_the_call_is_named(name, call, message):
    with pytest.raises(ModelError, match=message):
        around(name, tiny.make(name), call=call)


@pytest.mark.parametrize(("name", "height", "near"), [("flux", 18, 16), ("wan", 24, 32), ("sd", 15, 16)])
def test_a_size_that_the_vae_cannot_divide_is_refused_with_the_nearest(name, height, near):
    with pytest.raises(
        ModelError, match=rf"model\.height={height} must be a multiple of \d+; try model\.height={near}"
    ):
        around(name, tiny.make(name), height=height)


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
    assert not made.scheduler.config["clip_sample"]
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


@pytest.mark.parametrize("kind", [FlowMapEulerDiscreteScheduler, PiflowScheduler])
def test_a_network_that_jumps_is_not_sent_to_another_scheduler(kind):
    with pytest.raises(ModelError, match=rf"{kind.__name__} jumps over .*no other scheduler") as caught:
        path_of(kind())
    assert "load the pipeline with" not in str(caught.value)


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
    weights, cond, x = lora(model), model.encode(tiny.PROMPTS), noise_like(model)
    assert {name.split(".")[0] for name in weights.parameters} == {"transformer", "transformer_2"}
    for times, expected in (([900.0, 900.0], {"transformer"}), ([900.0, 300.0], {"transformer", "transformer_2"})):
        model.predict(x, torch.tensor(times), cond, 1.0).sum().backward()
        assert {name.split(".")[0] for name, p in weights.parameters.items() if p.grad is not None} == expected
    with torch.no_grad(), weights.using("reference"):
        assert model.predict(x, torch.tensor([900.0, 300.0]), cond, 1.0).shape == x.shape


# ---- prompts


@pytest.mark.parametrize(
    ("name", "call", "prompts", "groups"),
    [
        ("qwen_image", tiny.CASES["qwen_image"].call, [*tiny.PROMPTS, "a circle"], [[0, 1, 2]]),
        ("cogview_4", {"max_sequence_length": 64}, ["a red circle", " ".join(["a red circle"] * 8)], [[0], [1]]),
    ],
)
def test_prompts_of_different_lengths_share_a_forward_where_a_mask_travels_along(name, call, prompts, groups):
    model, count = around(name, tiny.make(name), call=call), len(prompts)
    cond = model.encode(prompts)
    assert len({len(row) for row in cond["0.0"]}) == count
    assert model._groups([500.0] * count, cond) == groups
    x, t = noise_like(model, count), torch.full((count,), 500.0)
    with torch.no_grad():
        together = model.predict(x, t, cond, 3.0)
        alone = [model.predict(x[k : k + 1], t[:1], cond.index(torch.tensor([k])), 3.0) for k in range(count)]
    assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


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
