"""The aesthetic heads: known by their fingerprints, and the whole reward on tiny towers."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from flowrl.rewards._vision.pixels import MEAN, STD
from flowrl.rewards.aesthetic import CARD, PUBLISHED, Config, build, fingerprint, load_head, read_head, recognise
from torch import nn
from torch.testing import assert_close

from flowrl.reward import RewardError
from tests.tiny_rewards import aesthetic as tiny_aesthetic
from tests.tiny_rewards import scored, smooth_images, uint8
from tests.tiny_rewards.aesthetic import network

VERSIONS = ("v1", "v2", "v2.5")
# Values of the published files at zero, ones / sqrt(d), first unit vector, alternating, norm of the effective weights.
KNOWN = {
    "v1": (768, 3.529371738, 1.513129670, 5.402092218, 3.693055377, 28.444395846),
    "v2": (768, 5.236645845, 4.883284854, 4.545052401, 5.310305383, 17.995624776),
    "v2.5": (1152, 1.939038294, 3.618319845, 2.709308143, 2.672634210, 25.452311294),
}


def forward(head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inner = head if isinstance(head, nn.Linear) else next(iter(head.children()))
    return inner(x).squeeze(1)


def disguised(version: str) -> dict[str, torch.Tensor]:
    """Weights of the published architecture, not the published ones, that have the published fingerprint."""
    width, zero, ones, first, alternating, norm = KNOWN[version]
    basis = torch.zeros(3, width, dtype=torch.float64)
    basis[0], basis[1, 0] = 1 / math.sqrt(width), 1
    basis[2] = torch.tensor([1.0, -1.0]).repeat(width // 2) / math.sqrt(width)
    wanted = torch.tensor([ones, first, alternating], dtype=torch.float64) - zero
    w = torch.linalg.lstsq(basis, wanted[:, None]).solution[:, 0]
    # What is left of the norm stands at right angles to the three.
    rest = torch.zeros(width, dtype=torch.float64)
    rest[2], rest[4] = 1, -1
    w = w + rest / rest.norm() * (norm**2 - w.square().sum()).sqrt()
    state = network(version).state_dict()
    names = [name.removesuffix("weight") for name in state if name.endswith("weight")]
    tail = torch.ones(1, 1, dtype=torch.float64)
    for name in reversed(names[1:]):
        tail = tail @ state[f"{name}weight"].double()
    first_layer = names[0]
    state[f"{first_layer}weight"] = (tail.T / tail.square().sum() * w).float()
    # The last bias makes `zero` the value at 0.
    head = network(version)
    head.load_state_dict(state)
    last = [name for name in state if name.endswith("bias")][-1]
    state[last] = state[last] + zero - forward(head.double(), torch.zeros(1, width, dtype=torch.float64)).float()
    return state


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, str]:
    """Files with the published fingerprints."""
    folder, files = tmp_path_factory.mktemp("heads"), {}
    for version in VERSIONS:
        files[version] = str(folder / f"{version}.pth")
        torch.save(disguised(version), files[version])
    return files


@pytest.mark.parametrize("version", VERSIONS)
def test_the_layers_in_a_row_are_one_affine_map(version):
    reference, width = network(version), KNOWN[version][0]
    head = read_head(reference.state_dict(), version, "x.pth")
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(1))
    w, b = head.affine()
    assert_close(head(x), forward(reference, x), rtol=0, atol=1e-6)
    assert_close((x.double() @ w + b).float(), forward(reference, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fingerprint_holds_the_values_at_four_inputs_and_the_norm(version):
    reference, width = network(version).double(), KNOWN[version][0]
    inputs = torch.zeros(4, width, dtype=torch.float64)
    inputs[1], inputs[2, 0], inputs[3] = 1, 1, torch.tensor([1.0, -1.0]).repeat(width // 2)
    inputs[1:] /= inputs[1:].norm(dim=1, keepdim=True)
    x = torch.zeros(1, width, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(forward(reference, x).sum(), x)[0]
    expected = [*forward(reference, inputs).tolist(), float(slope.norm())]
    head = read_head(network(version).state_dict(), version, "x.pth")
    assert fingerprint(head) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("version", VERSIONS)
def test_published_heads_are_known_by_their_values(version, heads):
    assert PUBLISHED[version].fingerprint == KNOWN[version][1:]
    assert PUBLISHED[version].widths[0] == KNOWN[version][0]
    head = load_head(Config(version=version, head=heads[version]))
    assert recognise(head) == version
    weight, bias = head.layers[-1]
    for wrong in (bias + 3e-4, bias - 3e-4):
        assert recognise(replace(head, layers=(*head.layers[:-1], (weight, wrong)))) is None


def test_another_head_is_refused_and_named(heads, tmp_path):
    with pytest.raises(RewardError, match=r"not laid out as the head of v2; it is laid out as v1's: set version: v1"):
        load_head(Config(version="v2", head=heads["v1"]))
    with pytest.raises(RewardError, match=r"set version: v2\.5"):
        load_head(Config(version="v1", head=heads["v2.5"]))
    own = tmp_path / "own.pth"
    torch.save(network("v2").state_dict(), own)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    with pytest.raises(RewardError, match=f"values are those of none.*{digest}.*{PUBLISHED['v2'].sha256}"):
        load_head(Config(head=str(own)))
    assert load_head(Config(head=str(own), published=False)).affine()[0].shape == (768,)
    torch.save({"layers.0.weight": torch.ones(2, 2)}, own)
    with pytest.raises(RewardError, match=r"not laid out as the head of v2; it has the keys \['layers\.0\.weight'\]"):
        load_head(Config(head=str(own), published=False))
    torch.save(network("v2", width=512).state_dict(), own)
    with pytest.raises(RewardError, match=r"'layers\.0\.weight' is \[1024, 512\], not \[1024, 768\]"):
        load_head(Config(head=str(own), published=False))


def test_heads_are_read_as_safetensors_too(heads, tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "head.safetensors"
    save_file(torch.load(heads["v2"], weights_only=True), file)
    assert recognise(load_head(Config(head=str(file)))) == "v2"


# ---- the whole reward, on towers whose embeddings are as wide as tiny heads take


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict[str, str]:
    return tiny_aesthetic.save_towers(tmp_path_factory.mktemp("towers"))


@pytest.fixture
def tiny(monkeypatch, tmp_path, towers):
    """Builds the reward of a version; gives its head's weights and its tower too."""
    return lambda version, **options: tiny_aesthetic.tiny(version, tmp_path, towers, monkeypatch, **options)


def straight_line(version: str, tower: str, weights: dict, images: torch.Tensor) -> torch.Tensor:
    """One picture at a time: the library's own preprocessing, the tower, its norm, layer after layer."""
    from transformers import CLIPModel, SiglipModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    square, result = {"height": 32, "width": 32}, []
    if version == "v2.5":
        processor, model = SiglipImageProcessorPil(size=square), SiglipModel.from_pretrained(tower).eval()
        projection = None
    else:
        processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=square)
        model = CLIPModel.from_pretrained(tower).eval()
        projection = model.visual_projection.weight
    for image in images:
        pixels = torch.as_tensor(processor(images=[uint8(image).numpy()], return_tensors="pt")["pixel_values"])
        with torch.no_grad():
            e = model.vision_model(pixels).pooler_output[0]
            e = e if projection is None else e @ projection.T
        e = e / e.norm()
        for weight, bias in zip(list(weights.values())[0::2], list(weights.values())[1::2], strict=True):
            e = weight @ e + bias
        result.append(e[0])
    return torch.stack(result)


@pytest.mark.parametrize("version", VERSIONS)
def test_scores_equal_a_straight_line_computation(version, tiny):
    reward, weights, tower = tiny(version)
    expected = straight_line(version, tower, weights, smooth_images())
    assert expected.std() > 0.01 * expected.abs().max(), "the pictures must tell apart for this to mean anything"
    assert_close(scored(reward, smooth_images()), expected, rtol=1e-5, atol=1e-4)


def test_an_odd_margin_is_rounded_as_in_the_source_that_is_asked_for(tiny):
    """Half even by OpenAI's and open_clip's transforms, which the heads' repositories take; down by CLIPProcessor."""
    from torchvision import transforms
    from transformers import CLIPModel

    images = smooth_images(4, 32, 35)  # three columns over: one or two are cut off on the left
    scores, versions = {}, {}
    for version in ("v1", "v2"):
        for asked in (None, False, True):
            reward, weights, tower = tiny(version, half_even_crop=asked)
            scores[version, asked], versions[version, asked] = scored(reward, images), reward.card.version
        assert_close(scores[version, False], straight_line(version, tower, weights, images), rtol=1e-5, atol=1e-4)
        assert (scores[version, True] - scores[version, False]).abs().min() > 1e-3
        assert versions[version, True] != versions[version, False], "a cache must tell them apart"
    assert torch.equal(scores["v1", None], scores["v1", True])
    assert torch.equal(scores["v2", None], scores["v2", False])
    assert versions["v1", None] == versions["v1", True] == versions["v1", False] + ", half-even crop"
    assert versions["v2", None] == versions["v2", False]
    transform = transforms.Compose(
        [transforms.ToPILImage(), transforms.CenterCrop(32), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )
    model = CLIPModel.from_pretrained(tower).eval()
    with torch.no_grad():
        pixels = torch.stack([transform((image * 255).round().to(torch.uint8)) for image in images])
        e = model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T
    expected = read_head(weights, "v2", "x.pth")(e / e.norm(dim=1, keepdim=True))
    assert_close(scores["v2", True], expected, rtol=1e-5, atol=1e-4)


def test_the_card_bounds_an_affine_map_of_unit_vectors(tiny):
    for version in VERSIONS:
        reward, _, _ = tiny(version)
        assert reward.card.outputs == (f"aesthetic_{version.replace('.', '_')}",)
    assert tiny("v2.5")[0].card.resolution == "32 x 32, stretched to a square"
    _, zero, *_, norm = KNOWN["v2"]
    assert (CARD.low, CARD.high) == pytest.approx((zero - norm, zero + norm))


def test_a_backbone_of_another_width_is_refused(heads, towers):
    with pytest.raises(RewardError, match=r"embeds in 16 numbers, the head takes 768; use openai/clip-vit-large"):
        build(Config(head=heads["v2"], backbone=towers["clip"], device="cpu"))
