"""The safety classifier's plumbing on a tiny random ViT, and the veto's rules."""

from __future__ import annotations

import math

import pytest
import torch
from flowrl.rewards.safety import CARD, Config, build, unsafe_classes
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward

SIZE, NAMES = 32, {0: "normal", 1: "NSFW", 2: "drawing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE,
        patch_size=8, id2label=NAMES, label2id={name: number for number, name in NAMES.items()},
    )  # fmt: skip
    path = tmp_path_factory.mktemp("vit")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(path)
    ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def reward(folder):
    return build(Config(model=folder, device="cpu"))


def pictures(count: int) -> torch.Tensor:
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).round(decimals=1)


def scored(reward, images) -> dict[str, torch.Tensor]:
    entry = WeightedReward("safety", reward)
    count = len(images)
    return Scorer([entry], max_failed_share=1.0).score(images, [""] * count, [{}] * count).raw


def by_hand(folder: str, images: torch.Tensor) -> torch.Tensor:
    """P(unsafe) of pictures of the network's own size: 8 bits, then mean and standard deviation of a half."""
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(((images * 255).round() / 255 - 0.5) / 0.5).logits
    return logits.exp()[:, 1] / logits.exp().sum(dim=1)


def test_safety_is_one_less_the_probability_of_the_unsafe_class(folder, reward):
    images = pictures(6)
    unsafe = by_hand(folder, images)
    assert unsafe.max() - unsafe.min() > 0.01
    assert_close(scored(reward, images)["safety"], 1 - unsafe, rtol=1e-4, atol=1e-5)


def test_the_veto_falls_from_the_bound_on(folder):
    images = pictures(6)
    bound = by_hand(folder, images).median().item()
    found = scored(build(Config(model=folder, device="cpu", veto_above=bound + 1e-4)), images)
    assert found["safety_ok"].tolist() == (by_hand(folder, images) < bound + 1e-4).float().tolist()
    assert 0 < found["safety_ok"].sum() < 6


def test_the_bound_itself_is_vetoed(folder, reward):
    unsafe = 1 - scored(reward, pictures(1))["safety"]
    strict = build(Config(model=folder, device="cpu", veto_above=unsafe.item()))
    assert scored(strict, pictures(1))["safety_ok"].tolist() == [0.0]


def test_several_classes_may_be_unsafe(folder):
    images = pictures(3)
    one, other, both = (
        scored(build(Config(model=folder, device="cpu", unsafe=names)), images)["safety"]
        for names in (("nsfw",), ("drawing",), ("Drawing", "nsfw"))
    )
    assert_close(1 - both, (1 - one) + (1 - other))


def test_a_clip_is_as_safe_as_its_least_safe_frame(reward):
    frames = pictures(6)
    clips = torch.stack([frames, frames.flip(0)])
    worst = scored(reward, frames)["safety"].min()
    assert_close(scored(reward, clips)["safety"], worst.expand(2))
    clips[1, 3, 0, 0, 0] = math.nan
    assert scored(reward, clips)["safety"].isnan().tolist() == [False, True]


def test_scores_do_not_depend_on_the_batch_and_a_broken_picture_is_masked_alone(reward):
    images = pictures(5)
    together = scored(reward, images)
    for name, values in together.items():
        alone = torch.cat([scored(reward, images[i : i + 1])[name] for i in range(5)])
        assert_close(values, alone)
        assert_close(scored(reward, images.flip(0))[name], values.flip(0))
    sizes = scored(reward, [images[0], torch.rand(3, 20, 50), images[1]])
    assert_close(sizes["safety"][[0, 2]], together["safety"][:2])
    images[2, 1, 4, 4] = math.inf
    for name, values in scored(reward, images).items():
        assert values.isnan().tolist() == [False, False, True, False, False]
        assert_close(values[[0, 1, 3, 4]], together[name][[0, 1, 3, 4]])


def test_autocast_and_the_generator_are_left_alone(reward):
    images, before = pictures(2), torch.get_rng_state()
    expected = scored(reward, images)["safety"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scored(reward, images)["safety"], expected)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_the_card_names_both_outputs(reward):
    assert reward.card is CARD
    assert scored(reward, pictures(1)).keys() == set(CARD.outputs)


@pytest.mark.parametrize(
    ("unsafe", "reason"),
    [
        (["nude"], r"no class 'nude', only \['NSFW', 'drawing', 'normal'\]"),
        ([], "must name some of the classes"),
        (["nsfw", "normal", "drawing"], "must name some of the classes"),
    ],
)
def test_unsafe_classes_are_found_by_name_or_refused(unsafe, reason):
    with pytest.raises(RewardError, match=reason):
        unsafe_classes(NAMES, unsafe)


def test_options_and_weights_that_cannot_be_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"veto_above=0.0 must be above 0"):
        Config(veto_above=0.0)
    with pytest.raises(ValueError, match=r"frames=0 must be at least 1"):
        Config(frames=0)
    with pytest.raises(RewardError, match=r"'safety' cannot load the classifier .*nowhere"):
        build(Config(model=str(tmp_path / "nowhere")))


def test_a_classifier_without_its_last_layer_is_refused(folder, tmp_path):
    """transformers draws it at random: every picture would have a probability, and none would mean anything."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("classifier.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"'safety'.*lacks 2 of its weights, such as 'classifier\.bias'"):
        build(Config(model=str(tmp_path), device="cpu"))
