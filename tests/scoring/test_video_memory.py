"""What a rollout of videos holds in host memory: 8 bits a value of each, and floats of one batch."""

import pytest
import torch
from torch import Tensor

from flowrl.media.eight_bits import EightBitImages
from flowrl.models.memory.meter import Meter
from flowrl.scoring.scorer import FLOATS, Scorer, most_at_once
from tests.scoring.test_overlap import B, draw, entry
from tests.toys import ToyAdapter

HEIGHT, WIDTH, FRAMES = 480, 832, 81
SIDE, FEW = 64, 5
VIDEO = FEW * 3 * SIDE * SIDE
"""Values of a small video. The rest of a toy's rollout is little next to them."""


class VideoToy(ToyAdapter):
    """A model of small videos; notes what is held before each batch is decoded."""

    num_frames = FEW

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.before: list[float] = []

    def decode(self, x0: Tensor) -> Tensor:
        self.before.append(self.meter.now / VIDEO)
        return torch.rand(len(x0), self.num_frames, 3, SIDE, SIDE)


def test_a_rollout_holds_97_mb_a_video_of_full_size_and_floats_of_one_batch_alone(monkeypatch):
    """Bytes of all tensors over those of a small video in 8 bits; the decoder has 4 of 12 at a time, the reward 2."""
    monkeypatch.setattr("flowrl.scoring.scorer.FLOATS", 2 * VIDEO)
    scored: list[float] = []

    def mean(videos, prompts, metadata):
        scored.append(meter.now / VIDEO)
        return [float(video.mean()) for video in videos]

    with Meter() as meter:
        adapter = VideoToy(meter)
        result = draw(Scorer([entry(mean, modality="video")]), adapter=adapter)
    # Latents and the like are what the rollout holds before its first video.
    rest = pytest.approx(0, abs=0.2)
    assert result.images.levels.shape == (B, FEW, 3, SIDE, SIDE)
    assert [held - B * (k > 0) for k, held in enumerate(adapter.before)] == [rest] * 3
    assert [held - B - 2 * 4 for held in scored] == [rest] * 6, "no floats but those of the two that it scores"
    # While a batch is rounded there are its floats, their levels as floats and in 8 bits.
    assert meter.peak / VIDEO - B - 4 * (4 + 4 + 1) == rest
    assert meter.now / VIDEO - B == rest
    full = FRAMES * 3 * HEIGHT * WIDTH
    assert result.images.levels.nbytes / B * full / VIDEO == 97_044_480


def test_a_reward_is_given_a_gib_of_floats_of_videos_of_full_size():
    """Counted, not run: tensors without contents."""
    levels = torch.empty((16, FRAMES, 3, HEIGHT, WIDTH), dtype=torch.uint8, device="meta")
    images = EightBitImages(levels, torch.ones(16, dtype=torch.bool))
    # A part that is scored is a view of the whole, and becomes floats two videos at a time.
    assert images[2:5].levels.untyped_storage().nbytes() == levels.nbytes
    assert most_at_once(images) == 2
    assert 4 * most_at_once(images) * levels[0].numel() <= 4 * FLOATS == 2**30
