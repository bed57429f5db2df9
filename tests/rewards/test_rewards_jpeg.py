"""JPEG size: orderings, not bytes, since those differ between builds of libjpeg."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards.jpeg import Config, build
from PIL import Image

from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.tiny_rewards import scored

SIZE = 64


def ladder() -> torch.Tensor:
    """A flat picture, a gradient, and noise: [3, 3, H, W]."""
    flat = torch.full((3, SIZE, SIZE), 0.3)
    gradient = torch.linspace(0, 1, SIZE).expand(3, SIZE, SIZE)
    noise = torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return torch.stack([flat, gradient, noise])


def sizes(images, **options) -> list[float]:
    return scored(build(Config(**options)), images, [""] * len(images)).tolist()


def training_values(mode: Any) -> list[float]:
    scorer = Scorer([WeightedReward("jpeg", build(Config(mode=mode)))])
    return scorer.score(ladder(), [""] * 3, [{}] * 3).values[0].tolist()


def test_flat_is_smaller_than_gradient_is_smaller_than_noise():
    flat, gradient, noise = sizes(ladder())
    assert 0.2 < flat < gradient < noise < 3 * SIZE * SIZE / 1000


def test_the_raw_value_is_thousands_of_bytes_of_the_rounded_picture():
    picture = ladder()[2]
    file = io.BytesIO()
    eight_bit = np.asarray(picture.permute(1, 2, 0) * 255 + 0.5).astype(np.uint8)
    Image.fromarray(eight_bit).save(file, format="JPEG", quality=95)
    assert sizes(picture[None]) == [pytest.approx(len(file.getvalue()) / 1000)]


def test_the_mode_turns_the_training_value_and_not_the_raw_one():
    assert sizes(ladder(), mode="compressibility") == sizes(ladder(), mode="incompressibility")
    assert training_values("compressibility") == [-value for value in training_values("incompressibility")]
    assert training_values("incompressibility") == pytest.approx(sizes(ladder()))


def test_a_lower_quality_makes_a_smaller_file():
    assert sizes(ladder()[2:], quality=30)[0] < 0.6 * sizes(ladder()[2:], quality=95)[0]


def test_values_beyond_the_range_are_clamped():
    assert sizes(torch.full((1, 3, 8, 8), 1.5)) == sizes(torch.ones(1, 3, 8, 8))


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match=r"an image must be \[3, H, W\], got \[4, 8, 8\]"):
        sizes(torch.zeros(1, 4, 8, 8))
