"""The safety classifier's plumbing on a tiny random ViT, and the veto's rules."""

import pytest
import torch
from flowrl.rewards.safety import Config, build, unsafe_classes
from torch.testing import assert_close

from flowrl.reward import RewardError
from tests.tiny_rewards import raw_scores as scored
from tests.tiny_rewards.safety import NAMES, SIZE, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def reward(folder):
    return build(Config(model=folder, device="cpu"))


def pictures(count: int) -> torch.Tensor:
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).round(decimals=1)


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


def test_a_video_with_one_broken_frame_has_no_score(reward):
    videos = pictures(6).view(2, 3, 3, SIZE, SIZE).clone()
    videos[1, 2, 0, 0, 0] = torch.nan
    assert scored(reward, videos)["safety"].isnan().tolist() == [False, True]


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
