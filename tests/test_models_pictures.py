"""Reference pictures and first frames: the generic adapter is the pipeline, and no sample sees another's picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from flowrl.models import _parity
from flowrl.models._pictures import content
from flowrl.models.base import ModelError
from flowrl.models.generic import Config, Generic
from flowrl.prompts import Prompt, Texts, require_pictures
from flowrl.strict import ConfigError
from tests import tiny_pipelines as tiny
from tests import tiny_sd3
from tests.contracts.test_models import GUIDED, lora, noise_like

ALL = list(tiny.PICTURED)


def picture(seed: int, size: tuple[int, int] = (20, 12)) -> Image.Image:
    """Noise; size is (width, height)."""
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy(), "RGB")


def adapter(name: str, size: tuple[int, int] | None = None) -> Generic:
    height, width = size or tiny.PICTURED[name].sizes[0]
    return Generic(tiny.make(name), Config(path="tiny", height=height, width=width, call=tiny.PICTURED[name].call))


def own_call(
    model: Generic, name: str, size: tuple[int, int], noise: Tensor, pictures: list[Any], scale: float
) -> tuple[Tensor, Tensor]:
    """(latents that leave the loop, pictures) of the pipeline's own call for one prompt from the same noise."""
    pipe, left = model.pipeline, []
    step, prepare = pipe.scheduler.step, pipe.prepare_latents

    def stepping(*args: Any, **kwargs: Any) -> Any:
        left.append(step(*args, **kwargs)[0])
        return (left[-1],)

    call = dict(tiny.PICTURED[name].call) | dict(zip(("image", "last_image"), pictures, strict=False))
    call["true_cfg_scale" if name == "qwen_image_edit" else "guidance_scale"] = scale
    if name == "qwen_image_edit" and scale > 1:
        call["negative_prompt"] = ""
    if name == "flux_kontext":
        call["max_area"] = size[0] * size[1]
    pipe.scheduler.step = stepping
    pipe.prepare_latents = lambda *args, **kwargs: (noise, *prepare(*args, **kwargs)[1:])
    try:
        made = pipe(
            prompt=tiny.PROMPTS[0],
            height=size[0],
            width=size[1],
            num_inference_steps=4,
            output_type="pt",
            return_dict=False,
            **call,
        )[0]
    finally:
        del pipe.scheduler.step, pipe.prepare_latents
    return left[-1], made


def euler(model: Generic, x: Tensor, cond: Any, scale: float) -> Tensor:
    grid = model.schedule(4)
    for k, timestep in enumerate(grid.timesteps):
        with torch.no_grad():
            x = x + (grid.sigmas[k + 1] - grid.sigmas[k]) * model.predict(x, timestep[None], cond, scale)
    return x


# ---- the adapter is the pipeline


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_the_euler_steps_reproduce_the_pipelines_own_call(name, guided):
    scale = GUIDED if guided else 1.0
    for size, own in zip(tiny.PICTURED[name].sizes, ([picture(0)], [picture(1, (16, 24))]), strict=True):
        model = adapter(name, size)
        x = noise_like(model, 1)
        found = euler(model, x, model.encode(tiny.PROMPTS[:1], [own]), scale)
        latents, pictures = own_call(model, name, size, x, own, scale)
        assert_close(found, latents.float(), atol=1e-4, rtol=0)
        assert pictures.std() > 0.01
        assert_close(model.decode(found), pictures.float(), atol=1e-4, rtol=0)


def test_a_first_and_a_last_frame_reach_the_call():
    size, call = tiny.PICTURED["wan_image"].sizes[0], tiny.PICTURED["wan_image"].call
    made = tiny.make("wan_image")
    sizes = {key: value for key, value in made.transformer.config.items() if not key.startswith("_")}
    made.transformer = type(made.transformer)(**(sizes | {"pos_embed_seq_len": 10})).eval()
    model = Generic(made, Config(path="tiny", height=size[0], width=size[1], call=call))
    assert model.picture_limits == (2, 2)
    x, both = noise_like(model, 1), [picture(0), picture(1)]
    found = euler(model, x, model.encode(tiny.PROMPTS[:1], [both]), GUIDED)
    assert_close(found, own_call(model, "wan_image", size, x, both, GUIDED)[0].float(), atol=1e-4, rtol=0)
    other = euler(model, x, model.encode(tiny.PROMPTS[:1], [[both[0], picture(2)]]), GUIDED)
    assert not torch.allclose(found, other, atol=1e-4)
    with pytest.raises(ModelError, match=r"2 picture\(s\) with a prompt, but .* takes at most 1"):
        adapter("wan_image").encode(tiny.PROMPTS[:1], [both])


def test_a_picture_that_is_optional_may_be_left_out():
    model = adapter("flux_kontext")
    x, size = noise_like(model, 1), tiny.PICTURED["flux_kontext"].sizes[0]
    found = euler(model, x, model.encode(tiny.PROMPTS[:1]), 1.0)
    assert_close(found, own_call(model, "flux_kontext", size, x, [], 1.0)[0].float(), atol=1e-4, rtol=0)


# ---- samples and their pictures


@pytest.mark.parametrize("name", ALL)
def test_samples_with_different_pictures_do_not_mix(name):
    """Also those of one size, which may share a forward, and of other sizes, which may not."""
    model = adapter(name)
    own = [[picture(0)], [picture(1)], [picture(2, (12, 20))], [picture(0)]]
    cond = model.encode([tiny.PROMPTS[0]] * 4, own)
    x = noise_like(model, 1).expand(4, *model.latent_shape())
    t = model.schedule(4).timesteps[1].repeat(4)
    with torch.no_grad():
        together = model.predict(x, t, cond, GUIDED)
        alone = [model.predict(x[:1], t[:1], cond.index(torch.tensor([k])), GUIDED) for k in range(4)]
        fresh = adapter(name)
        last = fresh.predict(x[:1], t[:1], fresh.encode([tiny.PROMPTS[0]], [own[2]]), GUIDED)
    assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-4)
    assert_close(together[0], together[3], atol=2e-5, rtol=1e-4)
    assert_close(together[2:3], last, atol=2e-5, rtol=1e-4)
    for k in (1, 2):
        assert not torch.allclose(together[0], together[k], atol=1e-5)


def test_pictures_of_one_size_share_a_forward_unless_the_pipeline_repeats_one_for_the_batch():
    own = [[picture(0)], [picture(1)], [picture(1)]]
    for name, groups in (("flux_kontext", [[0, 1, 2]]), ("wan_image", [[0], [1, 2]])):
        model = adapter(name)
        assert model._groups([500.0] * 3, model.encode([tiny.PROMPTS[0]] * 3, own)) == groups


@pytest.mark.parametrize("name", ALL)
def test_a_replay_is_bitwise_the_rollout_from_the_cache_without_encoders(name, tmp_path):
    model = adapter(name)
    prompts = []
    for k, text in enumerate(tiny.PROMPTS):
        picture(k).save(tmp_path / f"{k}.png")
        prompts.append(Prompt(text, {}, (str(tmp_path / f"{k}.png"),)))
    prompts.append(Prompt(prompts[0].text, {}, prompts[1].pictures))
    texts = Texts(model, prompts, cache=True)
    assert len(texts.rows) == 3
    cond, x = texts.lookup([prompts[2], prompts[0], prompts[2]]), noise_like(model, 3)
    t = model.schedule(4).timesteps[1].repeat(3)
    with torch.no_grad():
        recorded = model.predict(x, t, cond, GUIDED)
    replayed = model.predict(x, t, texts.lookup([prompts[2], prompts[0], prompts[2]]), GUIDED)
    assert replayed.requires_grad
    assert torch.equal(replayed, recorded)
    assert model.decode(x).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_every_lora_b_matrix_but_the_dead_ones_has_a_gradient(name):
    model = adapter(name)
    cond, weights = model.encode(tiny.PROMPTS, [[picture(0)], [picture(1)]]), lora(model)
    for timestep in model.schedule(4).timesteps[1:]:
        model.predict(noise_like(model), timestep.repeat(2), cond, GUIDED).square().sum().backward()
    ends = {key.partition(".lora_")[0]: p.grad for key, p in weights.parameters.items() if "lora_B" in key}
    still = {key for key, grad in ends.items() if grad is None or not bool(grad.any())}
    assert still == set(model.dead_lora_modules()) & set(ends)
    assert len(ends) >= 4


@pytest.mark.parametrize("name", ["qwen_image_edit", "flux_kontext"])
def test_the_doctors_list_passes(name):
    assert all(error <= 1e-4 for _, error in _parity.checks(adapter(name), GUIDED))


# ---- bad input


def test_a_prompt_without_the_picture_that_its_model_needs_is_named():
    model = adapter("qwen_image_edit")
    with pytest.raises(ModelError, match=r"needs 1 picture\(s\) with each prompt: a \.jsonl record with 'image'"):
        model.encode(tiny.PROMPTS)
    given = [Prompt("a", {}, ("a.png",)), Prompt("b")]
    message = r"data\.prompts: prompt 2, 'b', has 0 picture\(s\), but QwenImageEditPipeline needs 1; give the paths"
    with pytest.raises(ConfigError, match=message):
        require_pictures(given, model, "data.prompts", given[0])
    with pytest.raises(ConfigError, match=r"prompt 1, 'c', has 2 picture\(s\), but .* takes 1; leave out 1"):
        require_pictures([Prompt("c", {}, ("a", "b"))], model, "data.prompts", given[0])


def test_a_model_of_text_only_refuses_prompts_with_pictures():
    one = Prompt("a", {}, ("a.png",))
    message = r"prompt 1, 'a', has 1 picture\(s\), but StableDiffusion3Pipeline takes none"
    with pytest.raises(ConfigError, match=message):
        require_pictures([one], tiny_sd3.adapter(), "data.prompts", one)
    height, width = tiny.CASES["sd3"].sizes[0]
    call = tiny.CASES["sd3"].call
    model = Generic(tiny.make("sd3"), Config(path="tiny", height=height, width=width, call=call))
    with pytest.raises(ConfigError, match=message):
        require_pictures([one], model, "data.prompts", one)
    with pytest.raises(ModelError, match=r"StableDiffusion3Pipeline takes none \(see docs/models\.md\)"):
        model.encode(["a"], [[picture(0)]])


def test_some_prompts_with_and_some_without_a_picture_are_refused():
    model, first = adapter("flux_kontext"), Prompt("a")
    with pytest.raises(ConfigError, match=r"data\.eval_prompts: prompt 1, 'b', has a picture, unlike the first prompt"):
        require_pictures([Prompt("b", {}, ("a.png",))], model, "data.eval_prompts", first)
    require_pictures([first, Prompt("b")], model, "data.prompts", first)


def test_a_pipeline_whose_frames_have_their_own_timesteps_is_refused():
    made = tiny.make("wan_image")
    made.register_to_config(expand_timesteps=True)
    made.transformer = tiny.make("wan").transformer
    model = Generic(made, Config(path="tiny", height=16, width=16, call=tiny.PICTURED["wan_image"].call))
    with pytest.raises(ModelError, match="feeds its network different timesteps within one sample"):
        model.latent_shape()


def test_a_picture_of_the_call_is_the_prompt_records():
    with pytest.raises(ModelError, match=r"model\.call\.image is not to be set: data\.prompts decides it"):
        Generic(tiny.make("flux_kontext"), Config(path="tiny", height=16, width=16, call={"image": "a.png"}))


def test_equal_pictures_and_only_those_have_equal_numbers():
    same, other, turned = picture(0), picture(1), picture(0, (12, 20))
    assert content([same]) == content([picture(0)])
    assert len({content([same]), content([other]), content([turned]), content([same, other])}) == 4
