"""Latents of given pictures: the adapters' `encode_pictures` against the VAE's own round trip."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests import native
from tests import tiny_pipelines as tiny

FAMILIES = ("sdxl", "sd3", "flux")
SIZE = (24, 16)
OTHERS = ((3, 16, 24), (1, 3, 16, 16), (1, 4, 24, 16))
"""Shapes that are no images of that size."""


def adapter(family: str) -> Any:
    model = native.adapter(family, tiny.make(family), SIZE)
    # As the published checkpoints have them, and far from 1 and 0, so that leaving one out is seen.
    model.pipeline.vae.register_to_config(scaling_factor=0.7, shift_factor=0.3)
    return model


def pictures(batch: int = 3) -> torch.Tensor:
    return torch.rand(batch, 3, *SIZE, generator=torch.Generator().manual_seed(0))


def drawn(model: Any, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, *model.latent_shape(), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_what_was_encoded_is_the_vaes_own_round_trip(family):
    model, given = adapter(family), pictures()
    vae = model.pipeline.vae
    latents = model.encode_images(given)
    assert latents.shape == (3, *model.latent_shape())
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    with torch.no_grad():
        expected = vae.decode(vae.encode(2 * given - 1).latent_dist.mean).sample / 2 + 0.5
    assert expected.std() > 0.01
    assert_close(model.decode(latents), expected.clamp(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_draws_from_the_posterior(family, monkeypatch):
    """Its standardised difference to the mean is the noise itself; two draws share nothing else."""
    model, given = adapter(family), pictures()
    noise = drawn(model)
    mean, moved = model.encode_images(given), model.encode_images(given, noise)
    once = model.encode_images(given, torch.ones_like(noise)) - mean
    assert bool((once > 0).all())
    assert_close((moved - mean) / once, noise, atol=1e-3, rtol=1e-3)
    law = model.pipeline.vae.encode(2 * given - 1).latent_dist
    assert_close(once.square().mean(), (0.7 * law.std).square().mean())


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_the_latents_are_those_of_the_pipelines_own_picture_to_picture_call(family):
    from diffusers.pipelines.flux.pipeline_flux_img2img import FluxImg2ImgPipeline
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_img2img import (
        StableDiffusion3Img2ImgPipeline,
    )

    model, given = adapter(family), pictures(1)
    kind = {"flux": FluxImg2ImgPipeline, "sd3": StableDiffusion3Img2ImgPipeline}[family]
    own = kind(**{name: part for name, part in model.pipeline.components.items()})
    if family == "flux":
        clean = own._encode_vae_image(own.image_processor.preprocess(given), torch.Generator().manual_seed(4))
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(4))
        clean, noise = (own._pack_latents(each, *each.shape) for each in (clean, noise))
    else:
        image, start = own.image_processor.preprocess(given), torch.zeros(1)
        options = (image, start, 1, 1, torch.float32, torch.device("cpu"))
        own.scheduler.scale_noise = lambda latents, timestep, noise: latents
        clean = own.prepare_latents(*options, generator=torch.Generator().manual_seed(4))
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(4))
    assert_close(model.encode_images(given, noise), clean, atol=1e-5, rtol=1e-5)


def test_rows_do_not_see_each_other():
    model, given = adapter("sd3"), pictures()
    whole = model.encode_images(given)
    assert_close(torch.cat([model.encode_images(one[None]) for one in given]), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "images", "noise", "words"),
    [
        *(("sd3", shape, None, r"are not \[B, 3, 24, 16\].*resize them, or set model\.height") for shape in OTHERS),
        ("flux", (1, 3, *SIZE), (1, 4, 6, 4), "shaped like the latents"),
        ("qwen_image", (1, 3, 16, 24), None, r"are not \[B, 3, 24, 16\]"),
    ],
)
def test_images_and_noise_of_another_shape_are_refused(family, images, noise, words):
    model = native.adapter(family, tiny.make(family), SIZE)
    with pytest.raises(ValueError, match=words):
        model.encode_images(torch.rand(images), None if noise is None else torch.randn(noise))


# ---- videos

TALL = (32, 16)


def wan(frames: int = 9) -> Any:
    model = native.adapter("wan", tiny.make("wan"), TALL, num_frames=frames)
    # Far from 0 and 1, and different from channel to channel.
    model.pipeline.vae.register_to_config(
        latents_mean=[0.1 * k - 0.5 for k in range(16)], latents_std=[0.5 + 0.2 * k for k in range(16)]
    )
    return model


def clip(batch: int = 2, frames: int = 9) -> torch.Tensor:
    return torch.rand(batch, frames, 3, *TALL, generator=torch.Generator().manual_seed(0))


def test_wans_latents_are_those_of_its_own_video_to_video_call_and_decode_undoes_them():
    from diffusers.pipelines.wan.pipeline_wan_video2video import WanVideoToVideoPipeline

    model, given = wan(), clip()
    own = WanVideoToVideoPipeline(**{name: model.pipeline.components[name] for name in PARTS})
    own.scheduler.add_noise = lambda latents, noise, timestep: latents
    video = own.video_processor.preprocess_video(list(given))
    expected = own.prepare_latents(
        video, 2, 16, *TALL, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)
    )
    assert expected is not None
    found = model.encode_images(given)
    assert found.shape == (2, *model.latent_shape())
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    # It encodes one video at a time, which sums in another order.
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.encode_images(given[:1]), expected[:1])
    vae = model.pipeline.vae
    with torch.no_grad():
        frames = vae.decode(vae.encode(2 * given.transpose(1, 2) - 1).latent_dist.mean).sample / 2 + 0.5
    decoded = model.decode(found)
    assert decoded.shape == (2, 9, 3, *TALL)
    # The latents were divided by their std and multiplied again, and the decoder amplifies that rounding.
    assert_close(decoded, frames.clamp(0, 1).transpose(1, 2), atol=1e-4, rtol=0)


PARTS = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")


def test_wan_draws_from_the_posterior_and_takes_one_frame_as_an_image():
    model, given = wan(), clip()
    noise = drawn(model, 2)
    mean, moved = model.encode_images(given), model.encode_images(given, noise)
    once = model.encode_images(given, torch.ones_like(noise)) - mean
    assert bool((once > 0).all())
    assert_close((moved - mean) / once, noise, atol=1e-3, rtol=1e-3)
    single = wan(frames=1)
    # The encoder is causal: the first latent frame sees the first frame alone.
    assert_close(single.encode_images(given[:, 0]), mean[:, :, :1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 3, *TALL), (2, 3, *TALL), (2, 9, 3, 16, 32), (2, 3, 9, *TALL)])
def test_videos_of_another_shape_are_refused(shape):
    with pytest.raises(
        ValueError, match=r"are not \[B, 9, 3, 32, 16\].*model\.height and model\.width, model\.num_frames"
    ):
        wan().encode_images(torch.rand(shape))


def test_a_frame_count_that_the_encoder_cannot_divide_is_named():
    """AutoencoderKLWan reads 4 frames at a time, whatever its factor in time: of 7 frames it drops two."""
    model = wan()
    model.num_frames = 7
    model.pipeline.vae_scale_factor_temporal = 2
    with pytest.raises(
        ValueError,
        match=r"model.num_frames=7: the VAE makes latents .* of so many given frames.*try model.num_frames=9",
    ):
        model.encode_images(clip(frames=7))
