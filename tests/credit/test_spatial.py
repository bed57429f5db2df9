"""Saliency maps on the latent grid."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.testing import assert_close

from flowrl import shapes
from flowrl.core.errors import ModelError
from flowrl.credit.saliency import dense_advantages, saliency, to_latent_grid
from flowrl.losses.ratio import clipped_ratio_loss
from flowrl.rollout.saliency_maps import importance, load_backbone


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scene_tokens(h: int = 6, w: int = 9, width: int = 12) -> torch.Tensor:
    """An object in the middle of a background, each with its own feature, and some noise."""
    inside = torch.zeros(h, w)
    inside[2:4, 3:6] = 1.0
    return (inside.flatten()[:, None] * draw(1, width, seed=1) + 0.1 * draw(h * w, width))[None]


def pictures(count: int = 2, height: int = 32, width: int = 48) -> torch.Tensor:
    coarse = torch.rand(count, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")


# ---- the map


def test_the_map_is_its_formula():
    """In numpy and scipy: top 3, weights sigma_j^2, Gaussian of sigma 1, min-max."""
    h, w = 6, 9
    tokens = scene_tokens(h, w)
    x = tokens[0].double().numpy()
    x = x - x.mean(axis=0)
    _, sigma, right = np.linalg.svd(x, full_matrices=False)
    total = np.zeros((h, w))
    for j in range(3):
        c = (x @ right[j]).reshape(h, w)
        c = (c - c.min()) / (c.max() - c.min())
        rim = np.concatenate([c[0], c[-1], c[1:-1, 0], c[1:-1, -1]])
        total += sigma[j] ** 2 / (sigma[:3] ** 2).sum() * (c if rim.mean() < 0.5 else 1 - c)
    blurred = ndimage.gaussian_filter(total, 1.0, mode="nearest")
    expected = (blurred - blurred.min()) / (blurred.max() - blurred.min())
    # float32 against float64.
    assert_close(saliency(tokens, (h, w))[0].double(), torch.from_numpy(expected), rtol=0, atol=1e-5)


@pytest.fixture(params=[1, -1])
def sign(request, monkeypatch) -> int:
    """Singular vectors as they come, and all of them turned round."""
    plain = torch.linalg.svd

    def turned(*args, **options):
        left, sigma, right = plain(*args, **options)
        return request.param * left, sigma, request.param * right

    monkeypatch.setattr(torch.linalg, "svd", turned)
    return request.param


def test_what_the_border_lacks_is_bright_whatever_sign_the_svd_gives(sign):
    found = saliency(scene_tokens(), (6, 9))
    assert float(found[0, 2:4, 3:6].min()) > 0.5 > float(found[0, [0, -1]].max())


@pytest.mark.parametrize("grid", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_corner_is_dark_where_the_border_cannot_tell(sign, grid):
    """A ramp: its border has a mean of exactly one half."""
    ramp = torch.arange(8.0)[None, :, None] * torch.tensor([1.0, 2.0])
    found = saliency(ramp, grid).flatten()
    assert float(found[0]) < 0.01
    assert float(found[-1]) > 0.99


def test_a_map_ignores_rotation_shift_and_scale_of_the_features():
    tokens = scene_tokens()
    rotation, _ = torch.linalg.qr(draw(12, 12, seed=3))
    found = saliency(7 * tokens @ rotation + draw(12, seed=4), (6, 9))
    assert_close(found, saliency(tokens, (6, 9)), rtol=0, atol=1e-4)


def test_each_frame_has_its_own_map_from_0_to_1():
    tokens = torch.cat([scene_tokens(), draw(2, 54, 12)])
    found = saliency(tokens, (6, 9))
    assert found.shape == (3, 6, 9)
    assert found.amin(dim=(1, 2)).tolist() == [0.0] * 3
    assert found.amax(dim=(1, 2)).tolist() == [1.0] * 3
    assert_close(torch.cat([saliency(t[None], (6, 9)) for t in tokens]), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1e4])
def test_tokens_that_are_all_alike_give_ones(shift):
    """Constant map or failure gives all ones, never zeros."""
    tokens = torch.full((2, 12, 5), shift)
    tokens[1] = draw(12, 5)
    found = saliency(tokens, (3, 4))
    assert_close(found[0], torch.ones(3, 4))
    assert float(found[1].min()) == 0.0
    tokens[1, 3, 2] = torch.nan
    assert_close(saliency(tokens, (3, 4)), torch.ones(2, 3, 4))


def test_tokens_that_do_not_fill_the_grid_are_refused():
    with pytest.raises(ValueError, match=r"must be \[B, 12, d\] for a grid of 3 x 4"):
        saliency(draw(1, 13, 5), (3, 4))


# ---- the latent grid


@pytest.mark.parametrize("shape", [(8, 8), (5, 11), (40, 60)])
def test_a_picture_map_has_the_shape_of_the_latents(shape):
    maps = saliency(scene_tokens(), (6, 9))[:, None]
    found = to_latent_grid(maps, shape)
    assert found.shape == (1, *shape)
    assert torch.equal(to_latent_grid(maps, (1, *shape))[:, 0], found)
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)


@pytest.mark.parametrize("frames", [1, 5, 33])
def test_a_clip_map_has_the_shape_of_the_latents(frames):
    """T_lat = (F - 1) / 4 + 1."""
    shape = ((frames - 1) // 4 + 1, 4, 7)
    maps = torch.rand(2, frames, 6, 9, generator=torch.Generator().manual_seed(0))
    found = to_latent_grid(maps, shape)
    assert found.shape == (2, *shape)
    # Stretched over the clip: the brightest place of the clip is 1, not of every frame.
    assert found.flatten(1).amin(dim=1).tolist() == [0.0, 0.0]
    assert found.flatten(1).amax(dim=1).tolist() == [1.0, 1.0]


def test_ones_stay_ones_and_a_map_may_keep_the_mean_update():
    assert_close(to_latent_grid(torch.ones(2, 5, 6, 9), (2, 4, 7)), torch.ones(2, 2, 4, 7))
    maps = saliency(scene_tokens(), (6, 9))[:, None]
    plain, kept = (to_latent_grid(maps, (5, 8), keep_mean=keep) for keep in (False, True))
    assert_close(kept.mean(dim=(1, 2)), torch.ones(1))
    assert_close(kept, plain / plain.mean())


@pytest.mark.parametrize(("maps", "shape"), [((1, 4, 4), (4, 4)), ((1, 2, 4, 4), (4, 4)), ((1, 2, 4, 4), (4,))])
def test_maps_of_another_kind_than_the_latents_are_refused(maps, shape):
    with pytest.raises(ValueError, match="do not fit"):
        to_latent_grid(torch.ones(maps), shape)


# ---- pictures


def tiny_dinov2(folder, registers: int = 0) -> str:
    from transformers import (
        BitImageProcessor,
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
    )

    BitImageProcessor(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}).save_pretrained(folder)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if registers:
            model = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**size, num_register_tokens=registers))
        else:
            model = Dinov2Model(Dinov2Config(**size))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["fixed", "dinov2"])
def backbone(request, tmp_path_factory):
    return load_backbone("fixed" if request.param == "fixed" else tiny_dinov2(tmp_path_factory.mktemp("dinov2")))


def test_a_backbone_gives_a_map_on_the_latent_grid(backbone):
    found = importance(pictures(), backbone, (4, 6))
    assert found.shape == (2, 4, 6)
    assert found.amax(dim=(1, 2)).tolist() == [1.0, 1.0]
    assert not torch.equal(found[0], found[1])
    clip = torch.stack([pictures(5), pictures(5).flip(0)])
    assert importance(clip, backbone, (2, 4, 6)).shape == (2, 2, 4, 6)
    # More frames than go through the network at once.
    many = pictures(19)
    assert_close(importance(many, backbone, (4, 6))[17:18], importance(many[17:18], backbone, (4, 6)))


def test_a_picture_of_one_colour_gives_ones(backbone):
    flat = torch.tensor([0.2, 0.9, 0.5])[None, :, None, None].expand(1, 3, 32, 48)
    assert_close(importance(flat, backbone, (4, 6)), torch.ones(1, 4, 6))
    assert_close(importance(flat.expand(5, -1, -1, -1)[None], backbone, (2, 4, 6)), torch.ones(1, 2, 4, 6))


def test_the_fixed_backbone_finds_the_objects_of_the_shapes_world():
    fixed = load_backbone()
    scenes = [scene for group in shapes.scenes().values() for scene in group][::12]
    images = np.stack([shapes.draw(scene, np.random.default_rng(i)) for i, scene in enumerate(scenes)])
    images = torch.from_numpy(images).float()
    maps = importance(images, fixed, (8, 8))
    objects = torch.nn.functional.adaptive_avg_pool2d((images.amax(dim=1) > 0.4).float(), 8)
    on = (maps * objects).sum(dim=(1, 2)) / objects.sum(dim=(1, 2))
    off = torch.stack([m[o == 0].mean() for m, o in zip(maps, objects, strict=True)])
    # The Gaussian of sigma 1 is wide on a grid of 8: next to four objects the background is bright too.
    assert len(on) > 200
    assert float((on / off).min()) > 1.5
    assert float((on / off).median()) > 4


@pytest.mark.parametrize("registers", [0, 3])
def test_dinov2_gives_patch_tokens_of_the_whole_frame(tmp_path, registers):
    """Without CLS, at the frame's size, without a crop."""
    from transformers import AutoModel

    folder = tiny_dinov2(tmp_path, registers)
    frames = pictures(2, 42, 73)  # not a multiple of 14 in width
    tokens, grid = load_backbone(folder)(frames)
    assert (grid, tokens.shape) == ((3, 5), (2, 15, 16))
    resized = torch.nn.functional.interpolate(frames, (42, 70), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    pixels = (resized - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder)(pixel_values=pixels).last_hidden_state[:, 1 + registers :]
    assert_close(tokens, expected)


def test_weights_that_cannot_be_found_are_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"backbone='.*nowhere' cannot be loaded.*; try algorithm.spatial.backbone=fixed"
    ):
        load_backbone(str(tmp_path / "nowhere"))


# ---- dense advantages


def test_a_dense_advantage_has_the_sign_of_its_sample_and_is_clipped_last():
    """Normalise A, multiply by M, clamp."""
    advantage = torch.tensor([[2.0, -1.0], [-8.0, 0.0]])
    maps = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    found = dense_advantages(advantage, maps, torch.tensor([5.0, 5.0]))
    assert found.shape == (2, 2, 3, 4, 5)
    assert torch.equal(found.sign(), advantage.sign()[:, :, None, None, None].expand_as(found))
    assert_close(found[1, 0], (-8 * maps[1]).clamp(-5, 5))
    assert_close(dense_advantages(advantage, maps, None)[1, 0], -8 * maps[1])


def test_nothing_is_broadcast():
    """a map of another shape than the dense log-prob raises, as does one for another sample."""
    dense = dense_advantages(torch.ones(2, 1), torch.ones(2, 3, 1), None).squeeze(1)
    with pytest.raises(ValueError, match="must agree"):
        clipped_ratio_loss(torch.zeros(2, 3, 5), dense, (1e-4, 1e-4))
    with pytest.raises(ValueError, match=r"must be \[E, R\] for E = 1 maps"):
        dense_advantages(torch.ones(2, 1), torch.ones(1, 3, 5), None)
    with pytest.raises(ValueError, match=r"must be \[E, R\]"):
        dense_advantages(torch.ones(2), torch.ones(2, 3, 5), None)
