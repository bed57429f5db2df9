"""A held first frame: clean, with timestep 0, the image by the declared rule, and in no number of the training."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.distributions import Normal
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt, require_images
from flowrl.diffusion.plan import window
from flowrl.media.first_frame import fitted_frame
from flowrl.models import generic
from flowrl.models.base import decoded
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.images import image_arguments
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import flow_sde
from tests import tiny_pipelines as tiny
from tests.models.test_models_images import GUIDED, adapter, images_of, noise_like, picture
from tests.native import lora

HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "wan_2_2_frame": lambda output: output[:, :, :1],
    "ltx_image": lambda output: output[:, : output.shape[1] // 3],
}
"""Pipelines that hold a first frame -> the part of their network's output that is the frame's (a view)."""


SIZE = (20, 16)
"""(width, height) of the given images, of none of the sizes and aspect ratios here; LTX gets larger ones."""


def encoded(model: Generic, name: str) -> Condition:
    return model.encode(tiny.PROMPTS, [images_of(name, seed, SIZE) for seed in (0, 1)])


@contextmanager
def disturbed(model: Generic, name: str, seed: int) -> Iterator[None]:
    """The network says something else of the held frame, by noise of std 10."""
    generator = torch.Generator().manual_seed(seed)

    def hook(_: Any, __: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = output[0].clone()
        part = HELD[name](changed)
        part += 10 * torch.randn(part.shape, generator=generator)
        return (changed, *output[1:])

    handle = model.network.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# ---- timesteps and the clean frame


@pytest.mark.parametrize("shared", [True, False])
def test_the_tokens_of_the_first_frame_have_timestep_0_and_all_others_their_samples(shared):
    model = adapter("wan_2_2_frame", (32, 16))
    cond, x, fed = encoded(model, "wan_2_2_frame"), noise_like(model, 2), []
    grid = model.schedule(4).timesteps
    t = grid[[1, 1 if shared else 2]]
    hook = model.network.register_forward_pre_hook(lambda _, __, kwargs: fed.append(kwargs), with_kwargs=True)
    model.predict(x, t, cond, GUIDED)
    hook.remove()
    assert len(fed) == 2  # both branches of the guidance
    rows, columns = 32 // 16, 16 // 16
    for kwargs in fed:
        times = kwargs["timestep"].reshape(2, -1, rows, columns)
        assert times.shape[1] == model.latent_shape()[1] + 1
        assert torch.equal(times[:, 0], torch.zeros(2, rows, columns))
        assert torch.equal(times[:, 1:], t.float().view(2, 1, 1, 1).expand_as(times[:, 1:]))
        # The latents behind it are flowrl's, whatever they are; the frame's are the image's, whatever the latents.
        assert torch.equal(kwargs["hidden_states"][:, :, 1:], x)
    again = []
    hook = model.network.register_forward_pre_hook(lambda _, __, kwargs: again.append(kwargs), with_kwargs=True)
    model.predict(-3 * x, t, cond, 1.0)
    hook.remove()
    clean = fed[0]["hidden_states"][:, :, 0]
    assert torch.equal(again[0]["hidden_states"][:, :, 0], clean)
    own = model.pipeline.video_processor.preprocess(fitted_frame(picture(0, SIZE), 32, 16))
    vae = model.pipeline.vae
    mean, std = (torch.tensor(vae.config[f"latents_{what}"]).view(1, -1, 1, 1) for what in ("mean", "std"))
    assert_close(clean[:1], (vae.encode(own.unsqueeze(2)).latent_dist.mode()[:, :, 0] - mean) / std)


def test_a_decoded_video_begins_with_the_image_whatever_the_latents():
    """Of Wan, whose VAE is causal: its first frame knows no other."""
    model = adapter("wan_2_2_frame")
    cond = encoded(model, "wan_2_2_frame")
    one, other = (decoded(model, noise_like(model, 2) * scale, cond, torch.arange(2)) for scale in (1, -2))
    assert_close(one[:, 0], other[:, 0], atol=1e-5, rtol=0)
    assert not torch.allclose(one[:, 1:], other[:, 1:], atol=1e-3)


# ---- no number of the training knows the held frame


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HELD)
def test_what_the_network_says_of_the_held_frame_changes_no_number(name, seed):
    """Samples, log_probs, the KL to another policy and the gradient of both are bitwise the same."""
    model = adapter(name)
    cond, weights = encoded(model, name), lora(model)
    policy, plan = Policy(model, flow_sde.build(flow_sde.Config()), GUIDED), window(model.schedule(3), 0.7)
    asked = Asked([SampleId(0, 0), SampleId(1, 0)], cond, torch.arange(2))

    def numbers() -> list[Tensor]:
        samples, edges = run(policy, plan, Noise(seed, "test", 1, model.latent_shape()), asked, batch_size=2)
        step = plan.steps(torch.tensor([1, 1]), model.process)
        x = noise_like(model, 2)
        now = policy.transition(x, step, cond)
        with torch.no_grad():
            other = policy.transition(x, step, model.encode(tiny.PROMPTS[::-1], [images_of(name, 2)] * 2))
        kl = now.kl(other)
        for p in weights.parameters.values():
            p.grad = None
        (now.log_prob(x.flip(0)) + kl).sum().backward()
        gradients = [p.grad for p in weights.parameters.values() if p.grad is not None]
        assert any(bool(g.any()) for g in gradients)
        return [samples.x0, edges.old_log_prob, kl.detach(), *gradients]

    before = numbers()
    with disturbed(model, name, seed):
        after = numbers()
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", HELD)
def test_the_mean_of_a_log_prob_is_taken_over_the_trained_values_alone(name):
    """By hand: the density of a whole sample, what the mask of the pipeline keeps left out."""
    model = adapter(name)
    cond, x, following = encoded(model, name), noise_like(model, 2), noise_like(model, 2).flip(0)
    step = window(model.schedule(3), 0.7).steps(torch.tensor([1, 1]), model.process)
    with torch.no_grad():
        found = Policy(model, flow_sde.build(flow_sde.Config()), GUIDED).transition(x, step, cond)
    free = model.images.free
    assert free is not None
    count = model.latent_shape()[0] * 3 * math.prod(model.latent_shape()[2:])  # three latent frames, one of them held
    assert len(free) == count * 2 // 3
    mask = torch.zeros(count).index_fill(0, free, 1.0)
    whole = [torch.full((2, count), 7.0).index_copy(1, free, each.flatten(1)) for each in (found.mean, following)]
    density = Normal(whole[0], found.std[:, None]).log_prob(whole[1])
    assert_close(found.log_prob(following), (density * mask).sum(1) / mask.sum(), rtol=1e-5, atol=1e-5)
    assert_close(found.log_prob(following, "sum"), (density * mask).sum(1), rtol=1e-5, atol=1e-3)


# ---- the rule that fits an image


def halves(width: int, height: int) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), (255, 0, 0))
    image.paste((0, 0, 255), (width // 2, 0, width, height))
    return image


def test_an_image_is_scaled_until_it_covers_the_size_and_its_middle_is_kept():
    wide = fitted_frame(halves(80, 20), 16, 16)
    assert wide.size == (16, 16)
    # The aspect ratio is kept: the edge between the halves is still in the middle, as sharp as the scale makes it.
    assert [wide.getpixel((place, 8)) for place in (0, 5, 10, 15)] == [(255, 0, 0)] * 2 + [(0, 0, 255)] * 2
    own = picture(0, (48, 32))
    assert fitted_frame(own, 32, 48).tobytes() == own.tobytes()
    scaled = adapter("wan_2_2_frame", (16, 32)).pipeline.video_processor.resize(picture(1, (64, 32)), 16, 32)
    assert fitted_frame(picture(1, (64, 32)), 16, 32).tobytes() == scaled.tobytes()


def test_flowrl_sample_fits_the_image_to_the_size_of_the_call():
    pipe = tiny.make("wan_2_2_frame")
    found = image_arguments(pipe, [picture(0, (50, 40))], {"height": 16, "width": 32})
    assert found["image"].size == (32, 16)
    with pytest.raises(ValueError, match=r"50 x 40 pixels .* too few for a frame of 832 x 480"):
        image_arguments(pipe, [picture(0, (50, 40))], {})
    own = picture(0, (50, 40))
    assert image_arguments(tiny.make("flux_kontext"), [own], {"height": 16, "width": 32})["image"] is own


# ---- bad input


def saved(folder: Path, size: tuple[int, int]) -> Prompt:
    file = folder / f"{size[0]}x{size[1]}.png"
    picture(0, size).save(file)
    return Prompt("it rolls", {}, (str(file),))


def test_an_image_that_is_no_first_frame_is_named_before_training(tmp_path):
    model, good, small = adapter("wan_2_2_frame", (32, 16)), saved(tmp_path, (40, 40)), saved(tmp_path, (20, 12))
    require_images([good, good], model, "data.prompts", good)
    message = (
        r"data\.prompts: prompt 2, 'it rolls', has the image '.*20x12\.png', which cannot be its first frame: its "
        r"20 x 12 pixels .* too few for a frame of 16 x 32: they would be enlarged 2\.67 times, and 2 is the most; "
        r"give a larger image"
    )
    with pytest.raises(ConfigError, match=message):
        require_images([good, small], model, "data.prompts", good)
    with pytest.raises(ModelError, match=r"the 1 image\(s\) \(20 x 12 px\) of the prompt 'a': .* 20 x 12 pixels"):
        model.encode(["a"], [[picture(0)]])
    Path(small.images[0]).write_text("broken")
    with pytest.raises(ConfigError, match=r"20x12\.png', which cannot be its first frame: .*cannot identify"):
        require_images([small], model, "data.prompts", small)


def test_exact_refuses_what_would_be_cropped(tmp_path):
    config = Config(path="tiny", height=16, width=32, first_frame="exact", call=tiny.IMAGED["wan_2_2_frame"].call)
    model, whole, other = Generic(tiny.make("wan_2_2_frame"), config), saved(tmp_path, (64, 32)), (64, 40)
    require_images([whole], model, "data.prompts", whole)
    with pytest.raises(ConfigError, match=r"64 x 40 .* not the aspect ratio of a frame of 32 x 16, .* try .*=crop"):
        require_images([saved(tmp_path, other)], model, "data.prompts", whole)


def test_a_model_that_keeps_a_first_frame_takes_that_one_alone(tmp_path):
    model, one = adapter("wan_2_2_frame"), saved(tmp_path, (20, 20))
    assert model.image_limits == (1, 1)
    with pytest.raises(ConfigError, match=r"has 2 image\(s\), but WanImageToVideoPipeline takes 1; leave out 1"):
        require_images([Prompt("a", {}, one.images * 2)], model, "data.prompts", one)
    with pytest.raises(ConfigError, match=r"has 0 image\(s\), but WanImageToVideoPipeline needs 1; give the paths"):
        require_images([Prompt("a")], model, "data.prompts", Prompt("a"))


def test_a_class_that_diffusers_does_not_have_is_named():
    with pytest.raises(ModelError, match=r"model\.pipeline='WanImageToVidPipeline' .* did you mean 'WanImageToVideo"):
        generic.build(Config(path="tiny", pipeline="WanImageToVidPipeline"))
