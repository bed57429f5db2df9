"""What a rollout of videos holds in host memory: 8 bits a value of each, and floats of one batch."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from flowrl.core.eight_bits import EightBitImages
from flowrl.scoring.scorer import FLOATS, Scorer, most_at_once
from tests.scoring.test_overlap import B, draw, entry
from tests.toys import ToyAdapter

HEIGHT, WIDTH, FRAMES = 480, 832, 81
BYTES = 3 * HEIGHT * WIDTH * FRAMES
"""Of a video in 8 bits."""


class Alive:
    """Tensors that were noted and are still there."""

    def __init__(self) -> None:
        self.noted: list[weakref.ref[Tensor]] = []
        self.most = 0

    def note(self, tensor: Tensor) -> Tensor:
        self.noted.append(weakref.ref(tensor))
        self.most = max(self.most, sum(found.numel() for ref in self.noted if (found := ref()) is not None))
        return tensor


class VideoToy(ToyAdapter):
    num_frames = 5

    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self.alive = alive

    def decode(self, x0: Tensor) -> Tensor:
        return self.alive.note(torch.rand(len(x0), self.num_frames, 3, 4, 4))


def test_a_rollout_of_full_size_holds_97_mb_a_video_and_a_gib_of_floats():
    """Counted, not run: tensors without contents."""
    levels = torch.empty((16, FRAMES, 3, HEIGHT, WIDTH), dtype=torch.uint8, device="meta")
    images = EightBitImages(levels, torch.ones(16, dtype=torch.bool))
    assert images.levels.nbytes == 16 * BYTES
    assert BYTES == 97_044_480
    # A part that is scored is a view of the whole, and becomes floats two videos at a time.
    assert images[2:5].levels.untyped_storage().nbytes() == images.levels.nbytes
    assert most_at_once(images) == 2
    assert 4 * most_at_once(images) * BYTES <= 4 * FLOATS == 2**30


def test_a_rollout_has_floats_of_one_batch_alone(monkeypatch):
    """Of the decoder, whose batch has 4 of 12 videos, and of a reward, which is given 2 at a time."""
    decoded, scored = Alive(), Alive()
    monkeypatch.setattr("flowrl.scoring.scorer.FLOATS", 2 * 5 * 3 * 4 * 4)

    def mean(videos, prompts, metadata):
        scored.note(videos)
        return [float(video.mean()) for video in videos]

    result = draw(Scorer([entry(mean, modality="video")]), adapter=VideoToy(decoded))
    assert result.images.levels.shape == (B, 5, 3, 4, 4)
    assert result.images.levels.dtype == torch.uint8
    assert (len(decoded.noted), decoded.most) == (3, 4 * 5 * 3 * 4 * 4)
    assert (len(scored.noted), scored.most) == (6, 2 * 5 * 3 * 4 * 4)
