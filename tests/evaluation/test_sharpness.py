"""Sharpness of images and videos: known values, blur, evaluations, the words."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from flowrl.evaluation import sharpness
from flowrl.evaluation.results import Evaluation
from flowrl.media import media
from flowrl.statistics import paired
from tests.evaluation.test_evaluate import CPU, call, evaluator, record
from tests.toys import OneOf, ToyAdapter


def of(frame: np.ndarray) -> float:
    """Of a grey [H, W] or of frames [F, H, W], in three equal colours."""
    return sharpness.sharpness(np.repeat(frame[..., None, :, :], 3, axis=-3).astype(np.uint8))


def test_a_checkerboard_is_1_a_constant_0_and_a_ramp_its_step():
    rows, columns = np.indices((6, 8))
    assert of(255 * ((rows + columns) % 2)) == 1.0
    assert of(np.full((6, 8), 77)) == 0.0
    # 6 x 7 steps of 10 levels across, 5 x 8 of 0 down.
    assert of(10 * columns) == pytest.approx(10 / 255 * 42 / (42 + 40))
    assert of(10 * columns) == of(10 * columns.max() - 10 * columns), "falling as well as rising"
    assert math.isnan(of(np.zeros((1, 1))))


def test_blur_lowers_it_noise_raises_it_and_a_video_has_the_mean_of_its_frames():
    noise = np.random.default_rng(0).integers(0, 256, (32, 32))
    soft = Image.fromarray(noise.astype(np.uint8))
    values = [of(np.asarray(soft.filter(ImageFilter.GaussianBlur(radius)))) for radius in (0, 0.5, 1, 2)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 5 * values[-1] > 0
    frames = np.stack([np.asarray(soft), np.full((32, 32), 9), np.asarray(soft.filter(ImageFilter.BLUR))])
    assert of(frames) == pytest.approx(np.mean([of(frame) for frame in frames]))


def test_an_evaluation_measures_every_sample_also_those_that_are_not_saved(tmp_path):
    found = call(evaluator(tmp_path, ToyAdapter(), save_images=None))
    for at in np.ndindex(5, 2):
        (file,) = (tmp_path / "eval/base").glob(f"{at[0]:05d}-{at[1]}.*")
        levels = np.stack([np.asarray(frame) for frame in media.read_frames(file)])[0].transpose(2, 0, 1)
        assert found.sharpness[at] == sharpness.sharpness(levels) > 0
    again = call(evaluator(tmp_path / "none", ToyAdapter(), save_images=0))
    np.testing.assert_array_equal(again.sharpness, found.sharpness)
    np.testing.assert_array_equal(Evaluation.load(tmp_path / "eval/base.json").sharpness, found.sharpness)
    parts = [call(evaluator(tmp_path, ToyAdapter(), world=OneOf(rank, 2, CPU))).sharpness for rank in range(2)]
    np.testing.assert_allclose(np.nansum(np.stack(parts), axis=0), found.sharpness, atol=1e-3)
    half = np.asarray([True, False, True, False, False])
    np.testing.assert_array_equal(found.of(half).sharpness, found.sharpness[half])


def test_the_base_stands_beside_it_with_the_paired_difference_by_hand():
    tables = [np.random.default_rng(seed).random((60, 2)) / 10 for seed in (0, 1)]
    base = replace(record("base", a=np.zeros((60, 2)).tolist()), sharpness=tables[0])
    tuned = replace(record("tuned", a=np.zeros((60, 2)).tolist()), sharpness=tables[0] * 0.9 + 0.001 * tables[1])
    found = sharpness.facts(base, tuned)
    assert found is not None
    change = tuned.sharpness - base.sharpness
    assert found["difference"]["mean"] == pytest.approx(change.mean())
    assert found["difference"] == paired.difference(base.sharpness, tuned.sharpness, base.groups)
    assert found["tuned"]["mean"] - found["base"]["mean"] == pytest.approx(change.mean())
    said = sharpness.sentence(found)
    assert f"{tables[0].mean():.4g}" in said
    assert f"{100 * change.mean() / tables[0].mean():+.1f} %" in said
    assert said.endswith("a clear loss.")
    sharper = sharpness.facts(tuned, base)
    assert sharper is not None
    assert "a clear loss" not in sharpness.sentence(sharper)
    assert sharpness.facts(base.of(np.zeros(60, dtype=bool)), None) is None


def test_a_sample_that_is_not_finite_has_none(tmp_path, monkeypatch):
    adapter = ToyAdapter()
    decode = adapter.decode

    def spoiled(x0: torch.Tensor, *rest) -> torch.Tensor:
        images = decode(x0, *rest).clone()
        images[0] = torch.nan
        return images

    monkeypatch.setattr(adapter, "decode", spoiled)
    found = call(evaluator(tmp_path, adapter, batch_size=10))
    assert np.isnan(found.sharpness).tolist() == [[True, False]] + [[False, False]] * 4
