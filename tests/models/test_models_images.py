"""Reference pictures and first frames: the generic adapter is the pipeline, and no sample sees another's picture."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt, require_images
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import solver_plan
from flowrl.media.first_frame import fitted_frame
from flowrl.models.base import decoded
from flowrl.models.generic import images
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.images import content
from flowrl.planning import parity
from flowrl.rollout.policy import Policy
from flowrl.samplers.ode import Ode
from tests import tiny_pipelines as tiny
from tests import tiny_sd3
from tests.contracts.test_models import GUIDED, noise_like
from tests.native import entered as adapter
from tests.native import lora, trained

ALL = [pytest.param(name, marks=() if case.fast else pytest.mark.slow) for name, case in tiny.IMAGED.items()]


def picture(seed: int, size: tuple[int, int] = (20, 12)) -> Image.Image:
    """Noise; size is (width, height)."""
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy(), "RGB")


def images_of(name: str, seed: int, size: tuple[int, int] = (20, 12)) -> list[Image.Image]:
    """As many as the case wants and as large, each another one."""
    case = tiny.IMAGED[name]
    large = (case.enlarged + size[0], case.enlarged + size[1])
    return [picture(seed + 100 * place, large) for place in range(case.images)]


def own_call(
    model: Generic, name: str, size: tuple[int, int], noise: Tensor, pictures: list[Any], scale: float
) -> tuple[Tensor, Tensor]:
    """(latents that leave the loop, pictures) of the pipeline's own call for one prompt from the same noise."""
    pipe, case = model.pipeline, tiny.IMAGED[name]

    def given(latents: Tensor) -> Tensor:
        if name == "ltx_image":
            # Tokens, the first frame's in front.
            return torch.cat([latents[:, : noise[0, 0, 0].numel()], noise.flatten(2).transpose(1, 2)], dim=1)
        return torch.cat([latents[:, :, :1], noise], dim=2) if name in ("sana_video_image", "wan_2_2_frame") else noise

    call = case.own_call(pipe, size, scale, 4)
    if model.frame_images:  # by the pipeline's own cropping, of the size that the adapter hands it
        pictures = [fitted_frame(each, *size) for each in pictures]
    if pictures:
        call |= {"image": pictures} if case.listed else dict(zip(("image", "last_image"), pictures, strict=False))
    if name == "flux_kontext":
        call["max_area"] = size[0] * size[1]
    with tiny.stepped(pipe, given) as left:
        made = pipe(prompt=tiny.PROMPTS[0], generator=torch.Generator().manual_seed(0), **call)[0]
    # Of what Wan's scheduler made of the image's places nothing is left.
    return left[-1][:, :, 1:] if name == "wan_2_2_frame" else left[-1], made


def euler(model: Generic, x: Tensor, cond: Condition, scale: float) -> Tensor:
    policy, plan = Policy(model, Ode(), scale), solver_plan(model.schedule(4))
    with torch.no_grad():
        for k in range(4):
            step = plan.steps(torch.tensor([k]), model.process)
            x = policy.transition(x, step, cond).mean
    return x


# ---- the adapter is the pipeline


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_the_euler_steps_reproduce_the_pipelines_own_call(name, guided):
    scale = GUIDED if guided else 1.0
    for number, size in enumerate(tiny.IMAGED[name].sizes):
        model = adapter(name, size)
        # The second is of the clip's own shape: HunyuanVideo 1.5 makes the clip of the picture's.
        own = images_of(name, number, ((20, 20), (2 * size[1], 2 * size[0]))[number])
        x, cond = noise_like(model, 1), model.encode(tiny.PROMPTS[:1], [own])
        found = euler(model, x, cond, scale)
        latents, pictures = own_call(model, name, size, x, own, scale)
        assert_close(found, latents.float(), atol=1e-4, rtol=0)
        assert pictures.std() > 0.01
        assert_close(decoded(model, found, cond, torch.tensor([0])), pictures.float(), atol=1e-4, rtol=0)


def test_a_first_and_a_last_frame_reach_the_call():
    size = tiny.IMAGED["wan_image"].sizes[0]
    made = tiny.make("wan_image")
    sizes = {key: value for key, value in made.transformer.config.items() if not key.startswith("_")}
    made.transformer = type(made.transformer)(**(sizes | {"pos_embed_seq_len": 10})).eval()
    model = adapter("wan_image", pipe=made)
    assert model.image_limits == (2, 2)
    x, both = noise_like(model, 1), [picture(0), picture(1)]
    found = euler(model, x, model.encode(tiny.PROMPTS[:1], [both]), GUIDED)
    assert_close(found, own_call(model, "wan_image", size, x, both, GUIDED)[0].float(), atol=1e-4, rtol=0)
    other = euler(model, x, model.encode(tiny.PROMPTS[:1], [[both[0], picture(2)]]), GUIDED)
    assert not torch.allclose(found, other, atol=1e-4)
    with pytest.raises(ModelError, match=r"2 image\(s\) with a prompt, but .* takes at most 1"):
        adapter("wan_image").encode(tiny.PROMPTS[:1], [both])


def test_a_picture_that_is_optional_may_be_left_out():
    model = adapter("flux_kontext")
    x, size = noise_like(model, 1), tiny.IMAGED["flux_kontext"].sizes[0]
    found = euler(model, x, model.encode(tiny.PROMPTS[:1]), 1.0)
    assert_close(found, own_call(model, "flux_kontext", size, x, [], 1.0)[0].float(), atol=1e-4, rtol=0)


# ---- samples and their pictures


@pytest.mark.parametrize("name", ALL)
def test_samples_with_different_pictures_do_not_mix(name):
    """Also those of one size, which may share a forward, and of other sizes, which may not."""
    model = adapter(name)
    own = [images_of(name, 0), images_of(name, 1), images_of(name, 2, (12, 20)), images_of(name, 0)]
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
    expected = {"flux_kontext": [[0, 1, 2]], "wan_image": [[0], [1, 2]], "qwen_image_edit_plus": [[0], [1], [2]]}
    for name, groups in expected.items():
        model, own = adapter(name), [images_of(name, seed) for seed in (0, 1, 1)]
        assert model._groups([500.0] * 3, model.encode([tiny.PROMPTS[0]] * 3, own)) == groups


def test_sources_of_one_size_are_encoded_together_and_each_as_alone(monkeypatch):
    sizes = [(20, 12), (12, 20), (20, 12), (20, 12), (12, 20), (20, 12)]
    own = [images_of("flux_kontext", seed, size) for seed, size in enumerate(sizes)]
    words = [f"{tiny.PROMPTS[0]} {k}" for k in range(6)]
    model, alone = adapter("flux_kontext"), adapter("flux_kontext")
    asked: list[int] = []
    enter = model.entrance.enter
    model.latent_shape()  # its probes are over
    monkeypatch.setattr(
        model.entrance, "enter", lambda batch, *rest, **more: asked.append(batch) or enter(batch, *rest, **more)
    )
    together = model.encode(words, own)
    assert asked == [1, 1, 2, 1, 3, 1]  # what shows the rows; the first of each size shows how large they are
    for k in range(6):
        one = alone.encode(words[k : k + 1], own[k : k + 1])
        for name in together.tensors.keys() - {"images.layout"}:
            assert_close(together[name][k], one[name][0], atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(images, "LARGEST", 2 * model.images.layouts[0].values)
    asked.clear()
    model.encode(words, own)
    assert asked == [2, 2, 2], "no more at once than the values of a large source"


@pytest.mark.parametrize("name", ALL)
def test_a_replay_is_bitwise_the_rollout_from_the_cache_without_encoders(name, tmp_path):
    model = adapter(name)
    prompts = []
    for k, text in enumerate(tiny.PROMPTS):
        files = []
        for place, one in enumerate(images_of(name, k)):
            files.append(str(tmp_path / f"{k}-{place}.png"))
            one.save(files[-1])
        prompts.append(Prompt(text, {}, tuple(files)))
    prompts.append(Prompt(prompts[0].text, {}, prompts[1].images))
    texts = Texts(model, prompts, cache=True)
    assert len(texts.rows) == 3
    cond, x = texts.lookup([prompts[2], prompts[0], prompts[2]]), noise_like(model, 3)
    t = model.schedule(4).timesteps[1].repeat(3)
    with torch.no_grad():
        recorded = model.predict(x, t, cond, GUIDED)
    replayed = model.predict(x, t, texts.lookup([prompts[2], prompts[0], prompts[2]]), GUIDED)
    assert replayed.requires_grad
    assert torch.equal(replayed, recorded)
    assert decoded(model, x, cond, torch.arange(3)).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_every_lora_b_matrix_but_the_dead_ones_has_a_gradient(name):
    model = adapter(name)
    cond, weights = model.encode(tiny.PROMPTS, [images_of(name, k) for k in (0, 1)]), lora(model)
    for timestep in model.schedule(4).timesteps[1:]:
        model.predict(noise_like(model), timestep.repeat(2), cond, GUIDED).square().sum().backward()
    adapted = {key.partition(".lora_")[0] for key in weights.parameters}
    assert len(adapted) >= 4
    assert trained(weights, "lora_B") == adapted - set(model.dead_lora_modules())


@pytest.mark.parametrize("name", ALL)
def test_the_doctors_list_passes(name):
    assert all(error <= 1e-4 for _, error in parity.checks(adapter(name), GUIDED))


def test_the_doctor_names_the_images_that_a_pipeline_takes():
    found = dict(parity.facts(adapter("ltx_image")))
    assert found["images with a prompt"] == "1"
    assert found["latents"] == "8x2x8x8; the pipeline's other latents are those of the image"
    assert found["kept of them"] == "192, 192x8"
    found = dict(parity.facts(adapter("qwen_image_edit_plus")))
    assert found["images with a prompt"] == "1 or more"
    assert found["samples at different timesteps"] == "are predicted one by one"
    assert dict(parity.facts(adapter("flux_2_references")))["images with a prompt"] == "0 or more"


def test_a_list_of_pictures_may_be_of_any_length_and_its_order_counts():
    model = adapter("flux_2_references")
    both = images_of("flux_2_references", 0)
    own = [both, both[::-1], [*both, both[0]], both[:1]]
    cond, x = model.encode([tiny.PROMPTS[0]] * 4, own), noise_like(model, 1)
    assert model._groups([500.0] * 4, cond) == [[0, 1], [2], [3]]
    with torch.no_grad():
        found = model.predict(x.expand(4, *x.shape[1:]), torch.full((4,), 500.0), cond, GUIDED)
    assert all(not torch.allclose(found[0], found[k], atol=1e-5) for k in (1, 2, 3))


def test_a_held_first_frame_is_no_latent_and_comes_back_in_the_clip():
    model = adapter("ltx_image")
    own = [images_of("ltx_image", seed) for seed in (0, 1)]
    cond, x = model.encode([tiny.PROMPTS[0]] * 2, own), noise_like(model, 1)
    assert model.latent_shape()[1] == 2  # of three latent frames
    clips = decoded(model, x.expand(2, *x.shape[1:]), cond, torch.tensor([0, 1]))
    assert clips.shape[1] == 9
    assert not torch.allclose(clips[0, 0], clips[1, 0], atol=1e-3)
    with pytest.raises(ValueError, match=r"holds a part of the video: decode\(latents, cond\) needs its conditions"):
        model.decode(x)


# ---- bad input


def test_a_prompt_without_the_picture_that_its_model_needs_is_named():
    model = adapter("qwen_image_edit")
    with pytest.raises(ModelError, match=r"needs 1 image\(s\) with each prompt: a \.jsonl record with 'image'"):
        model.encode(tiny.PROMPTS)
    given = [Prompt("a", {}, ("a.png",)), Prompt("b")]
    message = r"data\.prompts: prompt 2, 'b', has 0 image\(s\), but QwenImageEditPipeline needs 1; give the paths"
    with pytest.raises(ConfigError, match=message):
        require_images(given, model, "data.prompts", given[0])
    with pytest.raises(ConfigError, match=r"prompt 1, 'c', has 2 image\(s\), but .* takes 1; leave out 1"):
        require_images([Prompt("c", {}, ("a", "b"))], model, "data.prompts", given[0])


def test_a_model_of_text_only_refuses_prompts_with_pictures():
    one = Prompt("a", {}, ("a.png",))
    message = r"prompt 1, 'a', has 1 image\(s\), but StableDiffusion3Pipeline takes none"
    with pytest.raises(ConfigError, match=message):
        require_images([one], tiny_sd3.adapter(), "data.prompts", one)
    model = adapter("sd3")
    with pytest.raises(ConfigError, match=message):
        require_images([one], model, "data.prompts", one)
    with pytest.raises(ModelError, match=r"StableDiffusion3Pipeline takes none \(see docs/models\.md\)"):
        model.encode(["a"], [[picture(0)]])


def test_some_prompts_with_and_some_without_a_picture_are_refused():
    model, first = adapter("flux_kontext"), Prompt("a")
    with pytest.raises(ConfigError, match=r"data\.eval_prompts: prompt 1, 'b', has an image, unlike the first prompt"):
        require_images([Prompt("b", {}, ("a.png",))], model, "data.eval_prompts", first)
    require_images([first, Prompt("b")], model, "data.prompts", first)


def test_a_pipeline_that_puts_its_image_back_after_every_step_is_refused():
    pipe = tiny.make("hunyuan_video_image")
    pipe.transformer.register_to_config(image_condition_type="token_replace")
    with pytest.raises(ModelError, match=r"token_replace' .* cannot be trained: it"):
        adapter("hunyuan_video_image", pipe=pipe)


def test_a_size_that_no_picture_can_give_is_refused_with_the_one_that_it_gives():
    message = r"height=16, model\.width=32 is not a size of HunyuanVideo15ImageToVideoPipeline: it makes 12 x 20"
    with pytest.raises(ModelError, match=message):
        adapter("hunyuan_video_1_5_image", (16, 32)).latent_shape()


def test_a_picture_that_a_pipeline_does_not_take_is_named_with_its_prompt():
    model = adapter("flux_2_references")
    with pytest.raises(
        ModelError, match=r"with the 1 image\(s\) \(20 x 12 px\) of the prompt 'b': ValueError: Image too"
    ):
        model.encode(["a", "b"], [[picture(0, (64, 64))], [picture(0)]])


@pytest.mark.parametrize("size", [(1, 1), (400, 1), (1, 400)])
def test_a_source_of_which_the_pipeline_leaves_nothing_is_named_with_its_size(size):
    model = adapter("flux_kontext")
    model.call.fixed["_auto_resize"] = False
    with pytest.raises(ModelError, match=rf"\({size[0]} x {size[1]} px\) of the prompt 'a': \w+Error: "):
        model.encode(["a"], [[picture(0, size)]])


def test_latents_that_the_loop_changes_before_its_step_are_refused():
    model = adapter("ltx_image")
    with pytest.raises(ModelError, match="changes the latents between prepare_latents"):
        model.images.find_free(torch.zeros(1, 6), lambda places: 2 * places[:, 2:])


def test_a_picture_of_the_call_is_the_prompt_records():
    with pytest.raises(ModelError, match=r"model\.call\.image is not to be set: data\.prompts decides it"):
        Generic(tiny.make("flux_kontext"), Config(path="tiny", height=16, width=16, call={"image": "a.png"}))


def test_equal_pictures_and_only_those_have_equal_numbers():
    same, other, turned = picture(0), picture(1), picture(0, (12, 20))
    assert content([same]) == content([picture(0)])
    assert len({content([same]), content([other]), content([turned]), content([same, other])}) == 4
