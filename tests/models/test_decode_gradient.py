"""A gradient through the decoder of every family: the images of `decode`, and finite differences at the latents."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.models.base import decoded
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
