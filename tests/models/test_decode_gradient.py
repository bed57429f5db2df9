"""A gradient through the decoder of every family: the images of `decode`, and finite differences at the latents."""

import json
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.core.assets import asset_roots
from flowrl.core.errors import ModelError
from flowrl.models.base import decoded
from flowrl.models.memory.meter import Meter, faked, measured
from flowrl.models.memory.options import MemorySettings
from flowrl.models.memory.units import recompute_units
from flowrl.planning.cuda_rules import cuda_rules
from tests import native
from tests import tiny_pipelines as tiny
from tests.models import test_models_images as images

KINDS = [name if kind.fast else pytest.param(name, marks=pytest.mark.slow) for name, kind in native.KINDS.items()]
GENERIC = ("sd", "ltx", "ltx_image", "sana")


def assert_slope(model: Any, cond: Any) -> None:
    generator, rows = torch.Generator().manual_seed(0), torch.tensor([0])
    x = torch.randn(1, *model.latent_shape(), generator=generator)
    with torch.no_grad():
        x = x - x.mean()
    x.requires_grad_()
    found = decoded(model, x, cond, rows, graph=True)
    plain = decoded(model, x, cond, rows)
    assert not plain.requires_grad
    assert_close(found.detach(), plain, rtol=0, atol=1e-6)
    weights = torch.randn(found.shape, generator=generator)
    (slope,) = torch.autograd.grad((found * weights).sum(), x)
    assert bool(slope.isfinite().all())
    direction, size = slope / slope.norm(), 1e-2
    with torch.no_grad():
        up, down = (
            (decoded(model, x + sign * size * direction, cond, rows).double() * weights).sum() for sign in (1, -1)
        )
    assert float((up - down) / (2 * size)) == pytest.approx(float(slope.norm()), rel=0.05)


@pytest.mark.parametrize("name", KINDS)
def test_of_a_native_family(name):
    model, _ = native.kind(name, native.KINDS[name].sizes[0])
    assert_slope(model, model.encode(tiny.PROMPTS[:1]))


@pytest.mark.parametrize("name", GENERIC)
def test_of_a_pipeline_that_is_entered(name):
    model = images.adapter(name)
    own = [images.images_of(name, 0)] if name in tiny.IMAGED else None
    assert_slope(model, model.encode([tiny.PROMPTS[0]], own))


# ---- recomputed activations


def climbed(model: Any, cond: Any, x: Tensor) -> tuple[int, Tensor, Tensor]:
    """(bytes that the decoder's forward leaves, images, gradient at `x` of their weighted sum)."""
    with Meter() as meter:
        found = decoded(model, x, cond, torch.zeros(len(x), dtype=torch.int64), graph=True)
        size = meter.now
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return size, found, torch.autograd.grad((found * weights).sum(), x)[0]


def assert_same(plain: Any, sparing: Any, cond: Any, count: int) -> None:
    x = torch.randn(count, *plain.latent_shape(), generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, found = climbed(plain, cond, x), climbed(sparing, cond, x)
    assert found[0] < 0.8 * expected[0]
    assert torch.equal(found[1], expected[1])
    assert expected[2].any()
    assert torch.equal(found[2], expected[2])
    assert torch.equal(sparing.decode(x, cond), plain.decode(x, cond))


@pytest.mark.parametrize("name", KINDS)
def test_a_native_decoder_that_recomputes_has_bitwise_the_same_gradient(name):
    own = native.KINDS[name]
    plain, sparing = (
        native.adapter(own.family, tiny.make(own.case), own.sizes[0], **own.options, **memory)
        for memory in ({}, {"memory": MemorySettings(vae_checkpointing=True)})
    )
    assert_same(plain, sparing, None, 2)


@pytest.mark.parametrize("name", GENERIC)
def test_another_decoder_recomputes_by_its_own_switch_or_says_that_it_has_none(name):
    plain = images.adapter(name)
    if not plain.pipeline.vae._supports_gradient_checkpointing:
        with pytest.raises(ModelError, match=r"model\.memory\.vae_checkpointing=true: \w+ has no enable_gradient"):
            images.adapter(name, memory={"vae_checkpointing": True})
        return
    sparing = images.adapter(name, memory={"vae_checkpointing": True})
    own = [images.images_of(name, 0)] if name in tiny.IMAGED else None
    assert_same(plain, sparing, plain.encode([tiny.PROMPTS[0]], own), 1)


def test_one_image_of_512_pixels_holds_at_most_one_and_a_half_gib_for_its_gradient():
    """SD3.5's decoder in bfloat16: everything alive at the worst moment, what is recomputed included."""
    folder = next(found for root in asset_roots() if (found := root / "model_configs" / "sd35-medium").is_dir())
    peaks = []
    for unit in (False, True):
        with torch.device("meta"):
            vae: Any = AutoencoderKL.from_config(json.loads((folder / "vae" / "config.json").read_text()))
        nn.Module.to(vae, torch.bfloat16)
        assert not unit or recompute_units(vae.decoder)
        with faked(vae), cuda_rules():
            x = torch.empty(1, 16, 64, 64, requires_grad=True)

            def work(vae: Any = vae, x: Tensor = x) -> None:
                torch.autograd.grad(vae.decode(x.bfloat16(), return_dict=False)[0].float().sum(), x)

            peaks.append(measured(work, grad=True)[0] / 2**30)
    assert peaks[0] > 2.8
    assert peaks[1] <= 1.5
