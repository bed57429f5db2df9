"""Latents of given pictures through the generic adapter: every class of pictures, against its own way to its VAE."""

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import solver_plan
from flowrl.media.eight_bits import eight_bit, unit_floats
from flowrl.models import generic, sd3
from flowrl.models.generic.families import FAMILIES
from flowrl.models.memory.meter import faked, measured
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.ode import Ode
from tests import native
from tests import tiny_pipelines as tiny
from tests.models.test_outline import both, modules

ALL = tiny.CASES | tiny.IMAGED
PICTURES = [name for name, case in ALL.items() if not {"num_frames", "frames"} & set(case.call)]
FILMS = [name for name in ALL if name not in PICTURES]


def uneven(pipe: Any) -> Any:
    """The pipeline with another scale and offset for each channel that has its own, and far from 1 and 0."""
    config, generator = pipe.vae.config, torch.Generator().manual_seed(7)
    if "latents_std" in config and config.latents_std is not None:
        count = len(config.latents_std)
        values = {
            "latents_mean": [0.3 * k - 0.5 for k in range(count)],
            "latents_std": [0.4 + 0.3 * k for k in range(count)],
        }
        pipe.vae.register_to_config(**values)
    else:
        pipe.vae.register_to_config(scaling_factor=0.6, shift_factor=0.3)
    if "batch_norm_eps" in config:
        for values, least in ((pipe.vae.bn.running_mean, -1.0), (pipe.vae.bn.running_var, 0.2)):
            values.copy_(2 * torch.rand(values.shape, generator=generator) + least)
    return pipe


def entered(name: str, size: tuple[int, int] | None = None, **options: Any) -> generic.Generic:
    return native.entered(name, size, uneven(tiny.make(name)), **options)


def pictures(model: Any, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, model.height, model.width, generator=torch.Generator().manual_seed(0))


def latents(model: Any, batch: int = 2) -> Tensor:
    return torch.randn(batch, *model.latent_shape(), generator=torch.Generator().manual_seed(1))


def posterior(vae: Any, given: Tensor) -> Any:
    """What the VAE itself makes of pictures; opaque ones, or clips of one frame, where it takes those."""
    given = 2 * given - 1
    if vae.config.get("in_channels") == 4:
        given = torch.cat([given, torch.ones_like(given[:, :1])], dim=1)
    return vae.encode(given[:, :, None] if "QwenImage" in type(vae).__name__ else given)


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_encoded_is_what_the_pipeline_decodes(name, monkeypatch):
    """Both ways exactly: a VAE that encodes to what it was given to decode gives the latents back."""
    model = entered(name, ALL[name].sizes[1])
    vae, x, given = model.pipeline.vae, latents(model), pictures(model)
    noise = latents(model)
    mean = model.encode_images(given)
    assert (mean.shape, mean.dtype, mean.requires_grad) == (x.shape, torch.float32, False)
    law = posterior(vae, given)
    shown = []
    decode = vae.decode
    monkeypatch.setattr(vae, "decode", lambda z, **rest: shown.append(z) or decode(z, **rest))
    model.decode(mean)
    own = law[0] if "latent" in law else law.latent_dist.mean
    assert_close(torch.cat(shown), own, atol=1e-5, rtol=1e-5)
    assert float(own.std()) > 0.01
    shown.clear()
    model.decode(x)
    z = torch.cat(shown)
    spread = DiagonalGaussianDistribution(torch.cat([z, torch.full_like(z, -60.0)], dim=1))
    law["latent" if "latent" in law else "latent_dist"] = z if "latent" in law else spread
    monkeypatch.setattr(vae, "encode", lambda given: law)
    assert_close(model.encode_images(given), x, atol=1e-5, rtol=1e-5)
    # Its spread is about 0 here, and a VAE without a posterior has none.
    assert_close(model.encode_images(given, noise), x, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_every_class_of_pictures_is_among_them():
    kinds = {type(tiny.make(name)).__name__ for name in PICTURES}
    films = {kind for kind in FAMILIES if "Video" in kind} | {type(tiny.make(name)).__name__ for name in FILMS}
    assert kinds == set(FAMILIES) - films


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux", "qwen_image"])
def test_the_generic_adapter_encodes_as_the_native_one(name):
    size, pipe = (24, 16), uneven(tiny.make(name))
    own = native.adapter(name, pipe, size)
    other = native.entered(name, size, native.copied(pipe))
    given = pictures(own)
    for noise in (None, latents(own)):
        found = own.encode_images(given, noise)
        assert float(found.std()) > 0.01
        assert_close(other.encode_images(given, noise), found, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(other.encode_images(given), found, atol=1e-3)


def test_the_latents_of_qwen_image_are_those_of_its_own_picture_to_picture_call():
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_img2img import QwenImageImg2ImgPipeline

    model = native.adapter("qwen_image", uneven(tiny.make("qwen_image")), (24, 16))
    given = pictures(model)
    own = QwenImageImg2ImgPipeline(**dict(model.pipeline.components))
    image = own.image_processor.preprocess(given)[:, :, None]
    encode: Any = own._encode_vae_image
    clean = encode(image, [torch.Generator().manual_seed(k) for k in (4, 5)])
    noise = torch.cat([torch.randn(clean[:1].shape, generator=torch.Generator().manual_seed(k)) for k in (4, 5)])
    clean, noise = (own._pack_latents(each, 2, *each.shape[1:2], *each.shape[-2:]) for each in (clean, noise))
    assert_close(model.encode_images(given, noise), clean, atol=1e-5, rtol=1e-5)
    decoded = model.pipeline.vae.decode(posterior(model.pipeline.vae, given).latent_dist.mean)[0][:, :, 0] / 2 + 0.5
    assert_close(model.decode(model.encode_images(given)), decoded.clamp(0, 1), atol=1e-5, rtol=0)


def test_a_vae_in_half_precision_rounds_the_pictures_and_not_the_places():
    model, half = entered("cogview_4"), entered("cogview_4", vae_precision="bfloat16")
    half.pipeline.vae.to(torch.bfloat16)
    given = pictures(model)
    expected, found = model.encode_images(given), half.encode_images(given)
    assert 0 < float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
    packings: list[Any] = [each._packing for each in (model, half)]
    assert_close(packings[1].scale, packings[0].scale, atol=0, rtol=1e-6)


# ---- what is refused


@pytest.mark.parametrize("name", ["wan", "ltx_image"])
def test_a_class_of_films_is_refused_by_name(name):
    model = native.entered(name)
    shown = torch.rand(1, model.num_frames, 3, model.height, model.width)
    with pytest.raises(ModelError, match=rf"{model.kind} makes no latents of given images.*column `given images`"):
        model.encode_images(shown)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda z: z.square(), r"a random sample comes back with a difference of \d\.\de[+-]\d+"),
        (lambda z: z + z.roll(1, dims=-1), "comes back with a difference of"),
        (lambda z: z.clamp(-1, 1), "comes back with a difference of"),
        (lambda z: 0 * z, "comes back with a difference of nan"),
        (lambda z: z[..., :2], "RuntimeError"),
    ],
    ids=["squared", "mixed", "cut off", "nothing", "cropped"],
)
def test_a_way_that_cannot_be_undone_is_refused_by_name_with_the_difference(change, words):
    pipe = tiny.make("flux")
    unpack = pipe._unpack_latents
    pipe._unpack_latents = lambda *given: change(unpack(*given))
    model = native.entered("flux", pipe=pipe)
    with pytest.raises(ModelError, match=rf"FluxPipeline cannot be used for given images: .*{words}"):
        model.encode_images(pictures(model))


def test_pictures_of_another_range_than_the_vaes_are_refused():
    pipe = tiny.make("sd3")
    show = pipe.image_processor.postprocess
    pipe.image_processor.postprocess = lambda image, **rest: show(image, **rest) ** 2
    model = native.entered("sd3", pipe=pipe)
    with pytest.raises(ModelError, match="comes back with a difference of"):
        model.encode_images(pictures(model))


def test_pictures_of_another_size_and_noise_of_another_shape_are_refused():
    model = entered("flux")
    with pytest.raises(ModelError, match=r"are not \[B, 3, 16, 16\].*resize them, or set model\.height"):
        model.encode_images(torch.rand(1, 3, 24, 16))
    with pytest.raises(ModelError, match="must be shaped like the latents"):
        model.encode_images(torch.rand(1, 3, 16, 16), torch.randn(1, 4, 8, 8))


# ---- a trained model, and a plan


@torch.no_grad()
def test_the_loss_on_the_models_own_samples_is_that_of_their_latents_and_knows_their_captions():
    """tiny-sd3 by the generic adapter: 24 samples, drawn, kept in 8 bits and encoded again."""
    model = generic.build(generic.Config(path="tiny-sd3", call={"max_sequence_length": 9}))
    prompts = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")] * 4
    ids = [SampleId(slot, 0) for slot in range(len(prompts))]
    noise, cond = Noise(0, "own", None, model.latent_shape()), model.encode(prompts)
    plan, rows = solver_plan(model.schedule(10)), torch.arange(len(prompts))
    drawn = run(Policy(model, Ode(), 4.0), plan, noise, Asked(ids, cond, rows), batch_size=24)[0].x0
    kept = model.encode_images(unit_floats(eight_bit(model.decode(drawn))))
    assert float((kept - drawn).square().mean()) < 0.05 * float(drawn.var())
    plain = sd3.build(sd3.Config(path="tiny-sd3", max_sequence_length=9))
    assert_close(kept, plain.encode_images(unit_floats(eight_bit(model.decode(drawn)))), atol=1e-5, rtol=1e-5)

    def loss(x0: Tensor, texts: Any) -> float:
        eps, sigma = torch.randn(x0.shape, generator=torch.Generator().manual_seed(2)), 0.7
        velocity = model.predict((1 - sigma) * x0 + sigma * eps, torch.full((len(x0),), 1000 * sigma), texts, 1.0)
        return float((velocity - (eps - x0)).square().mean())

    right = loss(kept, cond)
    # A little below: the VAE's means are what it was trained on.
    assert right == pytest.approx(loss(drawn, cond), rel=0.2)
    assert right < 0.5 * loss(kept, cond.index(rows.roll(1)))
    shuffled = kept.flatten(1)[:, torch.randperm(kept[0].numel(), generator=torch.Generator().manual_seed(3))]
    assert right < 0.5 * loss(shuffled.view_as(kept), cond)


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_plan_measures_the_encoder(name, tmp_path):
    real, outline = both(name, tmp_path)
    given = pictures(real)
    real.encode_images(given)
    peak, operations = measured(lambda: real.encode_images(given), grad=False)
    with faked(*modules(outline)):
        empty = torch.empty(given.shape)
        found = measured(lambda: outline.encode_images(empty), grad=False)
    assert found[1] == operations
    assert 0.9 * peak < found[0] < 1.2 * peak
