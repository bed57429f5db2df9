"""Signs of dead pictures on pictures that are dead in known ways."""

import colorsys
import math

import numpy as np
import pytest
import torch
from flowrl.rewards.degeneracy import Config, build

from tests.tiny_rewards import raw_scores

SIZE = 32
LUMINANCE = (0.2126, 0.7152, 0.0722)


def scored(images, **options) -> dict[str, list[float]]:
    scores = raw_scores(build(Config(**options)), images)
    return {name.removeprefix("degeneracy_"): values.tolist() for name, values in scores.items()}


def flat(*color: float) -> torch.Tensor:
    return torch.tensor(color).view(3, 1, 1).expand(3, SIZE, SIZE)


def noise(seed: int = 0) -> torch.Tensor:
    return torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def checkerboard() -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    return ((rows + columns) % 2).float().expand(3, SIZE, SIZE)


def wave(cycles: int) -> torch.Tensor:
    """A whole number of cycles across the picture, on 8 bits exactly periodic."""
    return (0.5 + 0.4 * (2 * math.pi * cycles * torch.arange(SIZE) / SIZE).cos()).expand(3, SIZE, SIZE)


@pytest.mark.parametrize(
    ("picture", "dead", "black", "constant"),
    [
        (flat(0.0, 0.0, 0.0), 1, 1, 1),
        (flat(1.0, 1.0, 1.0), 1, 0, 1),
        (flat(0.8, 0.1, 0.3), 1, 0, 1),
        (flat(0.5, 0.5, 0.5) + 0.01 * (noise() - 0.5), 1, 0, 1),
        (0.02 * noise(), 1, 1, 1),
        (noise(), 0, 0, 0),
        (wave(1), 0, 0, 0),
    ],
)
def test_black_white_and_constant_pictures_are_dead(picture, dead, black, constant):
    found = scored(picture[None])
    assert (found["degenerate"], found["black"], found["flat"]) == ([dead], [black], [constant])


def test_the_bounds_are_the_options():
    dim = 0.1 * checkerboard()
    assert scored(dim[None], black=0.04, flat=0.02)["degenerate"] == [0.0]
    assert scored(dim[None], black=0.06, flat=0.02)["black"] == [1.0]
    assert scored(dim[None], black=0.04, flat=0.06)["flat"] == [1.0]


def test_high_frequencies_are_told_from_low_ones():
    found = scored(torch.stack([flat(0.3, 0.6, 0.1), wave(3), wave(12), checkerboard(), noise()]))["high_frequency"]
    assert found[:4] == [0.0, pytest.approx(0.0, abs=1e-3), pytest.approx(1.0, abs=1e-3), pytest.approx(1.0)]
    assert found[4] == pytest.approx(0.75, abs=0.06)


def test_saturation_and_luminance_are_those_of_the_definitions():
    found = scored(noise()[None])
    pixels = (noise() * 255).round().permute(1, 2, 0).reshape(-1, 3).numpy() / 255
    assert found["saturation"] == [pytest.approx(np.mean([colorsys.rgb_to_hsv(*p)[1] for p in pixels]), rel=1e-5)]
    luminance = (pixels @ np.asarray(LUMINANCE)).reshape(SIZE, SIZE)
    energy = np.abs(np.fft.fft2(luminance - luminance.mean())) ** 2
    low = [min(i, SIZE - i) <= SIZE // 4 for i in range(SIZE)]
    assert found["high_frequency"] == [pytest.approx(1 - energy[np.ix_(low, low)].sum() / energy.sum(), rel=1e-5)]
    assert scored(flat(0.0, 0.0, 0.0)[None])["saturation"] == [0.0]
    assert scored(flat(1.0, 0.0, 0.0)[None])["saturation"] == [1.0]
