"""Images prepared in threads next to a GPU, and image towers in bfloat16."""

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flowrl.rewards._vision import clips, pool
from flowrl.rewards._vision.arrays import finite
from flowrl.rewards._vision.pixels import Pixels
from torch.testing import assert_close

from flowrl.rewards import clip_score, hpsv2, pickscore
from tests import toy_clip
from tests.tiny_rewards import hpsv2 as tiny_hps
from tests.tiny_rewards import scored, smooth_images


@pytest.mark.parametrize(
    ("device", "cores", "processes", "expected"),
    [("cpu", 64, 1, 1), ("cuda", 16, 1, 8), ("cuda", 32, 8, 3), ("cuda", 8, 8, 1), ("cuda", 4, 8, 1)],
)
def test_threads_are_a_share_of_the_cores_and_one_without_a_gpu(monkeypatch, device, cores, processes, expected):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert pool.threads(torch.device(device)) == expected


def test_an_image_is_finite_without_nan_and_inf_however_large_its_values_are():
    image = torch.rand(3, 8, 8)
    for value, expected in ((0.5, True), (-1.0, True), (math.nan, False), (math.inf, False), (-math.inf, False)):
        image[1, 2, 3] = value
        assert finite(image) is expected
    assert finite(torch.full((3, 8, 8), 3e38)), "their sum is inf"
    image[0, 0, 0], image[1, 2, 3] = math.inf, -math.inf
    assert not finite(image)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_any_number_of_threads_prepares_the_same_batch_in_the_same_order(fit):
    images = [*smooth_images(5, 40, 57), torch.full((3, 9, 9), torch.nan)]
    one, four = (Pixels(size=24, fit=fit, threads=count)(images) for count in (1, 4))
    assert_close(one, four, rtol=0, atol=0, equal_nan=True)
    assert one[-1].isnan().all()


def test_images_are_prepared_at_the_same_time_and_those_with_gradients_by_the_caller(monkeypatch):
    both, seen = threading.Barrier(2), []

    def meets(image: torch.Tensor) -> torch.Tensor:
        both.wait(60)
        return image

    assert pool.stacked(meets, list(torch.zeros(4, 3, 2, 2)), 2).shape == (4, 3, 2, 2)
    resize = F.interpolate

    def noted(*given: Any, **options: Any) -> torch.Tensor:
        seen.append(threading.current_thread())
        return resize(*given, **options)

    monkeypatch.setattr(F, "interpolate", noted)
    image = smooth_images(2, 20, 20).requires_grad_()
    Pixels(size=8, preprocess="fast", threads=4)(image).sum().backward()
    assert set(seen) == {threading.main_thread()}
    assert image.grad is not None


def test_the_rewards_score_the_same_through_threads(monkeypatch, tmp_path):
    tiny_hps.save(tmp_path)
    tiny_hps.tiny_network(monkeypatch)
    clip, images, scores = toy_clip.save(tmp_path / "clip"), smooth_images(), []
    for count in (1, 3):
        for module in (hpsv2, clips):
            monkeypatch.setattr(module, "threads", lambda device, count=count: count)
        rewards = (
            hpsv2.build(hpsv2.Config(weights=str(tmp_path), device="cpu", preprocess="exact")),
            pickscore.build(pickscore.Config(model=clip, tokenizer=clip, device="cpu")),
        )
        scores.append(torch.stack([scored(reward, images) for reward in rewards]))
    assert torch.equal(*scores)


@pytest.mark.parametrize("kind", ["save", "save_open_clip"])
def test_an_image_tower_in_bfloat16_gives_nearly_the_same_cosines(tmp_path, kind):
    """The tower alone is cast: the temperature and the text stay exact."""
    folder, images = getattr(toy_clip, kind)(tmp_path / "clip"), smooth_images()
    exact, cast = (
        clip_score.build(clip_score.Config(model=folder, device="cpu", dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    first, second = (scored(reward, images) for reward in (exact, cast))
    assert second.dtype == torch.float32
    assert not torch.equal(first, second)
    # 2 layers, each of them rounds to 8 bits of mantissa a few times.
    assert_close(second, first, rtol=0, atol=8 * 2.0**-8)
    assert cast.card.memory_gib < exact.card.memory_gib
