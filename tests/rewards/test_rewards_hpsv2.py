"""HPS v2: its geometry by published vectors, its files, and scores on a tiny network of the same kind."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from flowrl.rewards._vision.pixels import MEAN, STD, margins, resized_shape
from flowrl.rewards.hpsv2 import Config, build, find_weights, prepared
from torch.testing import assert_close

from flowrl.reward import RewardError
from tests import toy_clip
from tests.tiny_rewards import PROMPTS, scored, smooth_images
from tests.tiny_rewards import hpsv2 as tiny
from tests.tiny_rewards.hpsv2 import ARCHITECTURE, CONTEXT, IMAGE_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.save(tmp_path_factory.mktemp("hps"))


@pytest.fixture(autouse=True)
def _tiny_network(monkeypatch):
    tiny.tiny_network(monkeypatch)


@pytest.fixture
def reward(folder):
    return build(Config(weights=folder, device="cpu"))


# ---- preprocessing


@pytest.mark.parametrize(
    ("height", "width", "resized", "bars"),
    [
        (512, 512, (224, 224), (0, 0, 0, 0)),
        (512, 768, (149, 224), (0, 37, 0, 38)),
        (1024, 768, (224, 168), (28, 0, 28, 0)),
        (720, 1280, (126, 224), (0, 49, 0, 49)),
        (480, 832, (129, 224), (0, 47, 0, 48)),
        # Half to even: 2.5 and 3.5.
        (5, 448, (2, 224), (0, 111, 0, 111)),
        (7, 448, (4, 224), (0, 110, 0, 110)),
        # Nothing is left of the short side but one row.
        (1, 2000, (1, 224), (0, 111, 0, 112)),
    ],
)
def test_geometry_is_that_of_the_published_preprocessing(height, width, resized, bars):
    assert resized_shape(height, width, 224, "pad") == resized
    assert margins(resized[0], resized[1], 224) == bars
    left, top, right, bottom = bars
    pixels = prepared(torch.ones(3, height, width), 224)
    black = -torch.tensor(MEAN) / torch.tensor(STD)
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert pixels.shape == (3, 224, 224)
    seen = pixels[:, top : 224 - bottom, left : 224 - right]
    assert_close(seen, white[:, None, None].expand_as(seen), rtol=0, atol=1e-5)
    hidden = torch.ones(224, 224, dtype=torch.bool)
    hidden[top : 224 - bottom, left : 224 - right] = False
    assert_close(pixels[:, hidden], black[:, None].expand(3, int(hidden.sum())), rtol=0, atol=1e-6)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 57), (91, 33), (20, 31)])
def test_preprocessing_equals_torchvisions(height, width, antialias):
    from PIL import Image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as V

    image = (torch.rand(3, height, width, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    image[..., width // 4 : width // 2], image[..., width // 2 :] = 0, 1
    eight_bit = Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy())
    scale = 32 / max(height, width)
    size = [round(height * scale), round(width * scale)]
    resized = V.resize(V.to_tensor(eight_bit), size, InterpolationMode.BICUBIC, antialias=antialias)
    assert resized.max() > 1, "overshoot is kept"
    down, across = 32 - size[0], 32 - size[1]
    bars = [across // 2, down // 2, across - across // 2, down - down // 2]
    expected = V.normalize(V.pad(resized, bars, fill=0), list(MEAN), list(STD))
    for way in ("exact", "fast"):
        assert_close(prepared(image, 32, preprocess=way, antialias=antialias), expected, rtol=0, atol=1e-5)


def test_a_picture_of_the_right_size_is_left_as_it_is_and_rounded_where_that_is_exact():
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(2))
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    assert_close(prepared(image, 32), (image - mean) / std, rtol=0, atol=1e-6)
    rounded = (image * 255).round() / 255
    assert_close(prepared(image, 32, preprocess="exact"), (rounded - mean) / std, rtol=0, atol=1e-6)
    assert prepared(image[:, :20], 32).shape == (3, 32, 32)


# ---- scores


def straight_line(file: str, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """All cosines, [B, B], of pictures already of the network's size."""
    import open_clip

    network: Any = open_clip.CLIP(**ARCHITECTURE).eval()
    network.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    tokenizer, seen, said = open_clip.SimpleTokenizer(), [], []
    for image, prompt in zip(images, prompts, strict=True):
        eight_bit = (image * 255).round() / 255
        pixels = (eight_bit - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        tokens = [tokenizer.sot_token_id, *tokenizer.encode(prompt)][: CONTEXT - 1]
        tokens.append(tokenizer.eot_token_id)
        with torch.no_grad():
            seen.append(network.visual(pixels[None])[0])
            said.append(toy_clip.read(network, tokens))
    unit = [torch.stack(rows) / torch.stack(rows).norm(dim=1, keepdim=True) for rows in (seen, said)]
    return unit[0] @ unit[1].T


@pytest.mark.parametrize(("version", "file"), [("v2.1", "HPS_v2.1_compressed.pt"), ("v2.0", "HPS_v2_compressed.pt")])
def test_scores_are_the_diagonal_of_all_cosines(folder, version, file):
    images = smooth_images(5, IMAGE_SIZE, IMAGE_SIZE)
    expected = straight_line(f"{folder}/{file}", images, PROMPTS).diagonal()
    assert expected.std() > 0.02, "the pictures and prompts must tell apart for this to mean anything"
    reward = build(Config(version=version, weights=folder, device="cpu"))
    assert_close(scored(reward, images), expected, rtol=0, atol=1e-5)
    assert reward.card.outputs == (f"hpsv2_{version[-1]}",)


# ---- files


def test_the_network_is_vit_h_14_without_quickgelu():
    import open_clip

    config = open_clip.get_model_config("ViT-H-14")
    assert config is not None
    assert not config.get("quick_gelu", False)
    sizes = config["embed_dim"], config["vision_cfg"]["image_size"], config["text_cfg"]["context_length"]
    assert sizes == (1024, 224, 77)


def test_the_other_release_is_never_taken_silently(folder, tmp_path):
    with pytest.raises(RewardError, match=r"HPS_v2_compressed\.pt holds v2\.0, but version='v2\.1'"):
        find_weights(Config(weights=f"{folder}/HPS_v2_compressed.pt"))
    with pytest.raises(RewardError, match=r"set version: v2\.1, or give HPS_v2_compressed\.pt"):
        find_weights(Config(version="v2.0", weights=f"{folder}/HPS_v2.1_compressed.pt"))
    with pytest.raises(RewardError, match=r"the folder .* has no HPS_v2\.1_compressed\.pt"):
        find_weights(Config(weights=str(tmp_path)))


def test_a_hash_that_is_given_must_be_that_of_the_file(folder):
    file = f"{folder}/HPS_v2.1_compressed.pt"
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert str(find_weights(Config(weights=file, sha256=digest.upper()))) == file
    with pytest.raises(RewardError, match=f"has sha256 {digest}, not 00"):
        find_weights(Config(weights=folder, sha256="00"))


def test_safetensors_are_read_and_other_networks_refused(folder, reward, tmp_path):
    from safetensors.torch import save_file

    state = torch.load(f"{folder}/HPS_v2.1_compressed.pt", weights_only=True)["state_dict"]
    save_file(state, tmp_path / "hps.safetensors")
    converted = build(Config(weights=str(tmp_path / "hps.safetensors"), device="cpu"))
    assert torch.equal(scored(converted, smooth_images()), scored(reward, smooth_images()))
    torch.save(state, tmp_path / "bare.pt")
    with pytest.raises(RewardError, match=r"bare\.pt' is not laid out as HPS_v2\.1_compressed\.pt: KeyError"):
        build(Config(weights=str(tmp_path / "bare.pt"), device="cpu"))
    del state["text_projection"]
    torch.save({"state_dict": state}, tmp_path / "half.pt")
    with pytest.raises(RewardError, match=r"(?s)half\.pt' holds no tiny-hps of open_clip.*text_projection"):
        build(Config(weights=str(tmp_path / "half.pt"), device="cpu"))
