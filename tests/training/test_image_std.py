"""The std of images inside a group, by whole sums, against its definition."""

import math
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.media.eight_bits import EightBitImages
from flowrl.training.image_std import group_image_std
from flowrl.training.world import World


def images_of(count: int, shape: tuple[int, ...], seed: int = 0) -> EightBitImages:
    levels = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return EightBitImages(levels, torch.ones(count, dtype=torch.bool))


def defined(images: EightBitImages, rows: torch.Tensor) -> float:
    """Mean over prompts of the std of pixels over the group's samples, in float64."""
    values = images.levels.double() / 255
    stds = [values[(rows == row) & images.finite].std(dim=0, correction=0).mean() for row in rows.unique()]
    return float(torch.stack(stds).mean())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 99), st.booleans())
def test_it_is_the_mean_std_of_pixels(rows, seed, video):
    images = images_of(len(rows), (2, 3, 5, 4) if video else (3, 5, 4), seed)
    expected = defined(images, torch.tensor(rows))
    assert group_image_std(images, torch.tensor(rows)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_images_of_more_values_than_are_summed_together_have_the_same_std(monkeypatch):
    images, rows = images_of(6, (3, 40, 40)), torch.tensor([0, 1, 0, 1, 0, 1])
    whole = group_image_std(images, rows)
    monkeypatch.setattr("flowrl.training.image_std._VALUES", 7)
    assert group_image_std(images, rows) == pytest.approx(whole, rel=1e-12)


def test_equal_images_have_none_and_black_and_white_have_the_most():
    levels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    assert group_image_std(EightBitImages(levels, torch.ones(4, dtype=torch.bool)), torch.zeros(4)) == 0
    levels[::2] = 255
    assert group_image_std(EightBitImages(levels, torch.ones(4, dtype=torch.bool)), torch.zeros(4)) == 0.5


def test_samples_that_are_not_finite_are_left_out():
    images, rows = images_of(6, (3, 4, 4)), torch.tensor([0, 0, 0, 1, 1, 1])
    images.finite[1] = False
    assert group_image_std(images, rows) == pytest.approx(defined(images, rows), rel=1e-12)
    images.finite[:] = False
    assert math.isnan(group_image_std(images, rows))


class Together:
    """Processes whose parts are known: what another one gives to `gather` comes before the own."""

    def __init__(self) -> None:
        self.parts: list[object] = []

    def gather(self, value: object) -> list[object]:
        self.parts.append(value)
        return self.parts


@pytest.mark.parametrize("cut", [2, 4, 5])
def test_processes_give_the_value_of_one_and_a_group_that_they_share_counts_by_its_parts(cut):
    images, groups = images_of(6, (3, 4, 4)), torch.tensor([0, 0, 1, 1, 2, 2])
    world, values = cast(World, Together()), []
    for part in (slice(0, cut), slice(cut, None)):
        own = EightBitImages(images.levels[part], images.finite[part])
        values.append(group_image_std(own, groups[part], world=world))
    whole = group_image_std(images, groups)
    if cut % 2 == 0:
        assert values[1] == whole
    else:  # the last group is in two parts of one sample each, which have no std
        first = EightBitImages(images.levels[:4], images.finite[:4])
        assert values[1] == pytest.approx(2 / 3 * group_image_std(first, groups[:4]), rel=1e-12)
