"""The SD and SDXL adapters against their pipelines' own calls, the generic adapter, and distilled schedulers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_euler_ancestral_discrete import EulerAncestralDiscreteScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_lcm import LCMScheduler
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import VPProcess
from flowrl.models.generic.adapter import Config, Generic
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import cps, ddim
from tests import native
from tests import tiny_pipelines as tiny
from tests.models.test_models_native import assert_alike

SIZE, IDS = (24, 16), [SampleId(0, 0), SampleId(1, 0)]
BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SNR = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
KINDS = {"sd": {}, "sd v": SNR, "sdxl": {}, "sdxl v": {"prediction_type": "v_prediction"}}
SLOW = pytest.mark.slow
BOTH = ["sd", pytest.param("sdxl", marks=SLOW)]


def made(kind: str) -> Any:
    """A tiny pipeline with a DDIM of that kind."""
    pipe = tiny.make(kind.split()[0])
    options = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    pipe.scheduler = DDIMScheduler(**BETAS | options | KINDS[kind])
    return pipe


def adapter(kind: str, pipe: Any = None, **options: Any) -> Any:
    return native.adapter(kind.split()[0], made(kind) if pipe is None else pipe, SIZE, **options)


def drawn(model: Any, sampler: Any, level: float, scale: float, steps: int) -> tuple[Noise, Tensor]:
    """(noise, latents) of a rollout in which every step has that noise level."""
    noise, cond = Noise(0, "parity", None, model.latent_shape()), model.encode(native.PROMPTS)
    plan = StepPlan(model.schedule(steps), (level,) * steps, ())
    samples, _ = run(Policy(model, sampler, scale), plan, noise, Asked(IDS, cond, torch.arange(2)), batch_size=2)
    return noise, samples.x0


def own_call(pipe: Any, noise: Noise, steps: int, **call: Any) -> Tensor:
    """Latents of the pipeline's own call, whose scheduler draws the same noise."""
    step, count = pipe.scheduler.step, iter(range(steps))

    @functools.wraps(step)
    def stepping(*args: Any, **options: Any) -> Any:
        return step(*args, **options, variance_noise=noise.step(IDS, next(count)))

    pipe.scheduler.step = stepping
    try:
        size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": steps, "latents": noise.initial(IDS)}
        return pipe(prompt=native.PROMPTS, output_type="latent", return_dict=False, **size, **call)[0]
    finally:
        del pipe.scheduler.step


# ---- the adapter is the pipeline


@pytest.mark.parametrize(
    ("scale", "eta"), [(1.0, 0.0), (3.0, 1.0), pytest.param(1.0, 1.0, marks=SLOW), pytest.param(3.0, 0.0, marks=SLOW)]
)
@pytest.mark.parametrize("kind", ["sd", "sd v", "sdxl", pytest.param("sdxl v", marks=SLOW)])
def test_ddim_reproduces_the_pipelines_own_call(kind, scale, eta):
    pipe = made(kind)
    model = adapter(kind, pipe)
    noise, x0 = drawn(model, ddim.build(ddim.Config()), eta, scale, 5)
    expected = own_call(pipe, noise, 5, guidance_scale=scale, eta=eta)
    assert not torch.allclose(noise.initial(IDS), expected, atol=0.1)
    assert_close(x0, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", BOTH)
def test_rescaled_guidance_and_the_negative_prompt_are_the_pipelines(family):
    pipe, call = made(family), {"guidance_rescale": 0.7, "negative_prompt": "blue"}
    model = adapter(family, pipe, **call)
    noise, x0 = drawn(model, ddim.build(ddim.Config()), 0.0, 3.0, 3)
    _, plain = drawn(adapter(family, pipe), ddim.build(ddim.Config()), 0.0, 3.0, 3)
    assert not torch.allclose(x0, plain, atol=1e-3)
    call["negative_prompt"] = ["blue"] * 2
    assert_close(x0, own_call(pipe, noise, 3, guidance_scale=3.0, **call), atol=1e-4, rtol=1e-4)


def test_an_empty_negative_prompt_is_one_in_the_pipelines_own_call_too():
    """SDXL leads away from zeros without one, and from the embedding of the empty text with it."""
    pipe = made("sdxl")
    model = adapter("sdxl", pipe, negative_prompt="")
    noise, x0 = drawn(model, ddim.build(ddim.Config()), 0.0, 3.0, 3)
    call = model.own_call(3, 3.0)
    call["negative_prompt"] = [call["negative_prompt"]] * 2
    own = {name: call[name] for name in ("guidance_scale", "negative_prompt")}
    assert_close(x0, own_call(pipe, noise, 3, **own), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(x0, own_call(pipe, noise, 3, guidance_scale=3.0), atol=1e-3)
    assert "negative_prompt" not in adapter("sdxl", made("sdxl")).own_call(3, 3.0)


@pytest.mark.parametrize("kind", ["sd v", pytest.param("sdxl v", marks=SLOW)])
def test_a_v_predictions_adapter_and_grid_are_the_generic_ones(kind):
    pipe = made(kind)
    model, other = adapter(kind, pipe), native.beside(pipe, SIZE)
    assert_alike(model, other, 3.0)
    assert (model.prediction_type, type(model.process)) == (other.prediction_type, VPProcess)


@pytest.mark.parametrize("family", BOTH)
def test_a_timestep_need_not_be_whole(family):
    model = adapter(family)
    x, _, cond = native.point(model)
    with torch.no_grad():
        here, close, far = (model.predict(x, torch.full((2,), t), cond, 1.0) for t in (300.0, 300.01, 300.5))
    assert 0 < float((close - here).abs().max()) < 0.05 * float((far - here).abs().max())


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_without_a_negative_prompt_sdxl_alone_leads_away_from_zeros(family):
    model = adapter(family)
    model.encode(native.PROMPTS)
    away = model.unconditional
    zeros = all(not bool(value.any()) for value in away.tensors.values())
    assert zeros == (family == "sdxl")  # force_zeros_for_empty_prompt


def generic(pipe: Any, **options: Any) -> Generic:
    return Generic(pipe, Config(path="tiny", height=SIZE[0], width=SIZE[1], **options))


@pytest.mark.parametrize("around", [lambda pipe, **options: adapter("sd", pipe, **options), generic])
def test_the_last_step_keeps_its_noise_where_final_alpha_is_first(around):
    """As DDPO's does; by default a grid ends where its scheduler does."""
    pipe = made("sd")
    pipe.scheduler = DDIMScheduler(**BETAS, clip_sample=False, steps_offset=1)
    clean, first = (around(pipe, final_alpha=rule).schedule(5) for rule in ("model", "first"))
    assert torch.equal(clean.sigmas[:-1], first.sigmas[:-1])
    assert torch.equal(clean.timesteps, first.timesteps)
    assert float(clean.sigmas[-1]) == 0
    assert float(first.sigmas[-1]) > 0.02


def test_a_flow_has_no_other_end():
    with pytest.raises(
        ModelError, match=r"model\.final_alpha=first: a flow ends at sigma 0; try model.final_alpha=model"
    ):
        generic(tiny.make("sd3"), final_alpha="first")


# ---- distilled checkpoints


def turbo() -> Any:
    pipe = tiny.make("sd")
    pipe.scheduler = EulerAncestralDiscreteScheduler(**BETAS, timestep_spacing="trailing")
    return pipe


def consistency(embedded: int | None = 16) -> Any:
    pipe = tiny.make("sd")
    own: dict[str, Any] = {key: value for key, value in pipe.unet.config.items() if not key.startswith("_")}
    torch.manual_seed(0)
    own["time_cond_proj_dim"] = embedded
    pipe.unet = UNet2DConditionModel(**own).eval()
    pipe.scheduler = LCMScheduler(**BETAS)
    return pipe


def kind_of(model: Any) -> str | None:
    return None if model.distilled is None else model.distilled.kind


def test_distilled_checkpoints_are_recognised_and_others_are_not():
    assert kind_of(adapter("sd", turbo())) == "adversarial"
    assert kind_of(adapter("sd", consistency())) == kind_of(adapter("sd", consistency(None))) == "consistency"
    assert not adapter("sd").distilled
    pipe = turbo()
    trailing: dict[str, Any] = BETAS | {"timestep_spacing": "trailing"}
    others: Any = (
        {"prediction_type": "v_prediction"},
        {"rescale_betas_zero_snr": True},
        {"timestep_spacing": "leading"},
    )
    for kind in (EulerAncestralDiscreteScheduler, EulerDiscreteScheduler):
        for options in others:
            pipe.scheduler = kind(**trailing | options)
            assert not adapter("sd", pipe).distilled
        pipe.scheduler = kind(**trailing)
        assert kind_of(adapter("sd", pipe)) == kind_of(native.beside(native.copied(pipe), SIZE)) == "adversarial"


def test_a_wrong_guess_is_put_right_by_model_distilled():
    wrong = adapter("sd", turbo(), distilled="none", negative_prompt="blue")
    assert native.output(wrong, 3.0).isfinite().all()
    said = adapter("sd", distilled="consistency")
    assert (kind_of(said), said.prediction_type, said.spacing) == ("consistency", "x0", "lcm")
    for pipe, how in ((turbo(), "none"), (made("sd"), "adversarial")):
        other = generic(pipe, distilled=how)
        assert other.distilled == adapter("sd", native.copied(pipe), distilled=how).distilled
        assert bool(other.distilled) == (how == "adversarial")
        other.check_guidance(1.0)
        if how == "adversarial":
            with pytest.raises(
                ModelError, match=r"no CFG, whose.* 1 then.*try guidance_scale=1\.0, or model\.distilled=none"
            ):
                other.check_guidance(3.0)


@pytest.mark.parametrize("kind", [EulerDiscreteScheduler, EulerAncestralDiscreteScheduler, LCMScheduler])
def test_the_generic_adapter_keeps_the_rules_of_distilled_checkpoints(kind):
    pipe = consistency() if kind is LCMScheduler else turbo()
    # Seven steps end at timestep 142 - 1, a DDIM step above clean data.
    pipe.scheduler = kind(**BETAS, timestep_spacing="trailing")
    other = native.beside(pipe, SIZE)
    assert float(other.schedule(7).sigmas[-1]) == 0
    if kind is LCMScheduler:  # embedded: one forward at any scale
        other.check_guidance(8.0)
        assert other.branches(8.0) == 1
        other = native.beside(consistency(None), SIZE)
    with pytest.raises(ModelError, match="takes no CFG"):
        other.check_guidance(2.0)


def test_a_turbo_step_is_eulers_ancestral_one():
    """Euler-ancestral is DDIM with eta 1, its latents divided by sqrt(1 + (sigma / alpha)^2)."""
    pipe = turbo()
    model, other = adapter("sd", pipe), pipe.scheduler
    other.set_timesteps(4)
    grid = model.schedule(4)
    assert torch.equal(grid.timesteps, other.timesteps)
    assert float(grid.sigmas[-1]) == 0
    step = StepPlan(grid, (1.0,) * 4, ()).steps(torch.arange(4), model.process)
    raw, x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    belief = model.process.predict(raw, x, step.sigma, "eps", step.alpha)
    law = ddim.build(ddim.Config()).transition(model.process, belief, x, step)
    for k, t in enumerate(other.timesteps):
        noise = torch.randn(64, generator=torch.Generator().manual_seed(k))
        other._step_index = None
        moved = other.step(raw[k], t, x[k] / step.alpha[k], generator=torch.Generator().manual_seed(k)).prev_sample
        assert_close(law.mean[k] + law.std[k] * noise, moved * step.alpha_next[k], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["turbo", "consistency"])
def test_a_distilled_checkpoint_takes_no_cfg(kind):
    model = adapter("sd", turbo() if kind == "turbo" else consistency(None))
    x, timestep, cond = native.point(model)
    assert model.predict(x, timestep, cond, 1.0).isfinite().all()
    with pytest.raises(ModelError, match=rf"guidance_scale=3: .*(?i:{kind}).* takes no CFG, whose scale is 1 then"):
        model.predict(x, timestep, cond, 3.0)


def test_an_option_of_cfg_is_refused_on_a_distilled_checkpoint():
    with pytest.raises(ModelError, match=r"belong to CFG, which .*Turbo"):
        adapter("sd", turbo(), negative_prompt="blue")


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_cps_with_all_its_noise_reproduces_the_consistency_models_own_call(scale, monkeypatch):
    """arXiv 2310.04378, with the guidance that the network embeds: one forward at any scale."""
    pipe = consistency()
    model = adapter("sd", pipe)
    assert [model.branches(s) for s in (1.0, 8.0)] == [1, 1]
    noise, x0 = drawn(model, cps.build(cps.Config()), 1.0, scale, 4)
    count = iter(range(4))
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_lcm.randn_tensor", lambda *_, **__: noise.step(IDS, next(count))
    )
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 4, "latents": noise.initial(IDS)}
    expected = pipe(prompt=native.PROMPTS, output_type="latent", return_dict=False, guidance_scale=scale, **size)[0]
    assert_close(x0, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(native.output(model, 1.0), native.output(model, 8.0), atol=1e-4)


def test_a_consistency_models_lora_is_trained_by_cps_and_replayed_exactly():
    model = adapter("sd", consistency())
    weights = native.lora(model)
    assert native.backward(model, weights, 8.0) == 0
    assert native.trained(weights, "lora_B") == {name.partition(".lora_")[0] for name in weights.parameters}


# ---- refusals


@pytest.mark.parametrize(
    ("family", "part", "change", "message"),
    [
        ("sdxl", "unet", {"projection_class_embeddings_input_dim": 72}, "as a refiner does.*use the base checkpoint"),
        ("sd", "unet", {"in_channels": 9}, "UNet2DConditionModel takes 9 channels, not the 4"),
        ("sdxl", "vae", {"latents_mean": [0.0] * 4}, r"model\.vae: its latents have a mean"),
    ],
)
def test_a_refiner_an_inpainting_unet_and_a_foreign_vae_are_refused(family, part, change, message):
    pipe = tiny.make(family)
    getattr(pipe, part).register_to_config(**change)
    with pytest.raises(ModelError, match=message):
        adapter(family, pipe)


def test_a_refiner_without_its_first_text_encoder_is_refused():
    pipe = tiny.make("sdxl")
    pipe.text_encoder = None
    with pytest.raises(ModelError, match=r"needs its component 'text_encoder'.*refiner"):
        adapter("sdxl", pipe)


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"timestep_spacing": "linspace", "final_alpha": "first"}, 5, "final_alpha: the last step would not move"),
        ({}, 1001, r"model\.timestep_spacing: 1001 steps"),
        (
            {"timestep_spacing": "lcm"},
            5,
            "timestep_spacing=lcm: .*try model.timestep_spacing=null, or model.distilled=consistency",
        ),
        ({"guidance_rescale": 1.5}, 5, r"guidance_rescale=1\.5 must lie in \[0, 1\]"),
    ],
)
def test_grids_that_cannot_be_are_refused_by_key(options, steps, message):
    with pytest.raises(ValueError, match=message):
        adapter("sd", **options).schedule(steps)


def test_a_noise_prediction_at_terminal_snr_0_is_refused():
    pipe = made("sd")
    pipe.scheduler = DDIMScheduler(**BETAS, clip_sample=False, rescale_betas_zero_snr=True, timestep_spacing="trailing")
    with pytest.raises(ModelError, match=r"pure noise .*v-prediction checkpoint"):
        adapter("sd", pipe).schedule(5)
