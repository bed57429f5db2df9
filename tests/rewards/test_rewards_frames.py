"""Rewards of pictures on clips."""

import itertools
import math
from typing import Any

import pytest
import torch
from flowrl.rewards._vision.frames import frame_indices, framewise
from torch.testing import assert_close


def brightness(images, prompts, metadata):
    """Mean of a picture plus the length of its prompt plus its record's number."""
    rows = zip(images, prompts, metadata, strict=True)
    return torch.stack([image.mean() + len(prompt) + record.get("n", 0) for image, prompt, record in rows])


def averaged(frames: int, *batch: Any, score: Any = brightness, chunk: int = 64) -> Any:
    """Scores of images or videos by some of their frames."""
    return framewise(score, frames, chunk=chunk)(*batch)


def clips(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.rand(length, 3, 4, 6, generator=generator) for length in lengths]


@pytest.mark.parametrize("total", [1, 2, 5, 16, 81])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 16, 100])
def test_frames_are_distinct_in_order_and_evenly_spread(total, count):
    taken = frame_indices(total, count)
    assert len(taken) == min(total, count)
    assert taken == sorted(set(taken))
    assert 0 <= taken[0] <= taken[-1] < total
    # Half a stretch is left at either end, and gaps differ by one frame at most.
    assert abs(taken[0] - (total - 1 - taken[-1])) <= 1
    gaps = [after - before for before, after in itertools.pairwise(taken)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_clip_without_frames_and_a_count_of_none_are_refused():
    with pytest.raises(ValueError, match="video of 0 frames"):
        frame_indices(0, 4)
    with pytest.raises(ValueError, match="take 1 at least"):
        frame_indices(4, 0)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_clip_has_the_mean_over_its_frames_with_its_own_prompt_and_record(chunk):
    images = [clips(3)[0], clips(1, 1)[0][0], clips(9, 9)[1]]
    prompts, records = ["a", "bb", "cccc"], [{"n": 10}, {"n": 20}, {"n": 40}]
    expected = [images[0][[0, 2]].mean() + 1 + 10, images[1].mean() + 2 + 20, images[2][[2, 6]].mean() + 4 + 40]
    assert_close(averaged(2, images, prompts, records, chunk=chunk), torch.stack(expected))
    all_frames = averaged(9, images, prompts, records, chunk=chunk)
    assert_close(all_frames[2], images[2].mean() + 4 + 40)


def test_one_failed_frame_fails_its_clip_and_no_other():
    images = clips(4, 4, 4)
    images[1][3] = math.nan
    assert averaged(4, images, ["a"] * 3, [{}] * 3).isnan().tolist() == [False, True, False]


def test_named_outputs_are_averaged_each():
    def two(images, prompts, metadata):
        values = brightness(images, prompts, metadata)
        return {"plain": values, "square": values.square()}

    images = clips(2, 3)
    result = averaged(8, images, ["", ""], [{}, {}], score=two, chunk=2)
    means = [image.mean(dim=(1, 2, 3)) for image in images]
    assert_close(result["plain"], torch.stack([m.mean() for m in means]))
    assert_close(result["square"], torch.stack([m.square().mean() for m in means]))


def test_gradients_reach_the_frames_that_were_looked_at():
    clip = clips(4)[0].requires_grad_()
    averaged(2, [clip], ["a"], [{}]).sum().backward()
    assert clip.grad is not None
    assert [bool(frame.any()) for frame in clip.grad] == [False, True, False, True]


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"got \[4, 6\]"):
        averaged(2, [torch.zeros(4, 6)], ["a"], [{}])
