"""Prompts: the order of a run, cached embeddings, pictures."""

import io
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.data.prompts import Prompt, PromptSource
from flowrl.data.text_cache import Texts
from flowrl.media.media import open_image
from flowrl.training.world import shard
from tests.toys import ToyAdapter

# ---- the order of a run


def source(count: int, per_iteration: int, seed: int = 0) -> PromptSource:
    return PromptSource([Prompt(str(k)) for k in range(count)], per_iteration, seed)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 30), per_iteration=st.integers(1, 40), seed=st.integers(0, 100))
def test_every_prompt_comes_exactly_once_per_epoch(count, per_iteration, seed):
    """Whatever the ratio of the iteration's size to the number of prompts."""
    order = source(count, per_iteration, seed)
    drawn = [k for iteration in range(1, 13) for k in order.draw(iteration)]
    assert len(drawn) == 12 * per_iteration
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts.get(k, 0) for k in range(count)) <= 1


@settings(max_examples=60, deadline=None)
@given(prompts=st.integers(1, 9), group=st.integers(2, 6), data=st.data())
def test_every_slot_has_exactly_its_group_over_the_union_of_any_number_of_ranks(prompts, group, data):
    """Each prompt k times, on any number of processes, none of which is idle."""
    size = data.draw(st.integers(1, prompts * group))
    parts = [shard(prompts, group, rank, size) for rank in range(size)]
    together = [pair for part in parts for pair in part]
    assert together == [(slot, sample) for slot in range(prompts) for sample in range(group)]
    assert all(parts)
    if size <= prompts:
        assert all(set(Counter(slot for slot, _ in part).values()) == {group} for part in parts)


def test_a_draw_depends_on_seed_and_iteration_alone_and_not_on_history():
    """So a resume needs no state."""
    walked = source(7, 4)
    history = {iteration: walked.draw(iteration) for iteration in range(1, 9)}
    for iteration in (8, 3, 1, 5):
        assert source(7, 4).draw(iteration) == history[iteration]
    assert walked.draw(2) == history[2]


def test_epochs_and_seeds_have_orders_of_their_own():
    order = source(50, 50)
    orders = [order.draw(1), order.draw(2), source(50, 50, seed=1).draw(1), list(range(50))]
    assert len(set(map(tuple, orders))) == 4


# ---- embeddings


def test_cached_texts_are_encoded_once_and_the_encoders_are_freed():
    adapter = ToyAdapter()
    fresh = ToyAdapter().encode(["b", "a", "c"])["prompt"]
    texts = Texts(adapter, ["a", "b", "a", "c"], cache=True, batch_size=2)
    assert adapter.freed
    assert adapter.encoded == [["a", "b"], ["c"]]
    assert torch.equal(texts.lookup(["b", "a", "c"])["prompt"], fresh)
    assert torch.equal(texts.lookup(["a", "a"])["prompt"], fresh[[1, 1]])
    assert adapter.encoded == [["a", "b"], ["c"]]


def test_texts_without_a_cache_are_encoded_when_asked_for():
    adapter = ToyAdapter()
    texts = Texts(adapter, ["a", "b"], cache=False, batch_size=2)
    assert adapter.encoded == []
    found = texts.lookup(["c", "a", "b"])
    assert adapter.encoded == [["c", "a"], ["b"]]
    assert not adapter.freed
    assert torch.equal(found["prompt"], ToyAdapter().encode(["c", "a", "b"])["prompt"])


def test_retired_prompts_are_passed_over_and_the_order_goes_on():
    found, plain, resumed = (source(5, 3, seed=1) for _ in range(3))
    order = [k for iteration in range(1, 8) for k in plain.draw(iteration)]
    assert [k for iteration in (1, 2) for k in found.draw(iteration)] == order[:6]
    found.retire(2, [order[7]])
    rest = [k for k in order[6:] if k != order[7]]
    assert [k for iteration in (3, 4, 5) for k in found.draw(iteration)] == rest[:9]
    assert found.draw(4) == rest[3:6]  # a draw is a function of the iteration, whatever was drawn before
    found.retire(5, [rest[0]])
    later = [k for k in rest[9:] if k != rest[0]]
    assert found.draw(6) == later[:3]
    resumed.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert resumed.draw(6) == found.draw(6)
    assert not resumed.exhausted
    resumed.retire(6, range(5))
    assert resumed.exhausted


# ---- pictures


def opened(image: Image.Image, kind: str, **options: Any) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return np.asarray(open_image(io.BytesIO(file.getvalue())))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_brought_to_8_by_rounding(kind):
    """Pillow's own conversion cuts it off at 255: nearly every picture is white."""
    wide = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    found = opened(Image.fromarray(wide), kind)
    assert found.shape == (32, 32, 3)
    assert np.array_equal(found, np.repeat(np.round(wide / 257).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize(("dtype", "reason"), [(np.int32, "32-bit grey"), (np.float32, "grey of floats")])
def test_grey_without_a_known_range_is_refused(dtype, reason):
    with pytest.raises(ValueError, match=f"{reason}, whose range is not known"):
        opened(Image.fromarray(np.full((2, 2), 7, dtype=dtype)), "TIFF")


PALETTE = Image.new("P", (3, 1))
PALETTE.putpalette([200, 0, 0, 0, 0, 100])
PALETTE.putdata([0, 1, 0])


@pytest.mark.parametrize(
    ("image", "kind", "options", "expected"),
    [
        (Image.new("RGBA", (1, 1), (200, 0, 0, 0)), "PNG", {}, [255, 255, 255]),
        (Image.new("RGBA", (1, 1), (200, 0, 0, 255)), "PNG", {}, [200, 0, 0]),
        (Image.new("RGBA", (1, 1), (200, 0, 100, 51)), "PNG", {}, [244, 204, 224]),
        (Image.new("LA", (1, 1), (20, 0)), "PNG", {}, [255, 255, 255]),
        (Image.new("L", (1, 1), 20), "PNG", {"transparency": 20}, [255, 255, 255]),
        (Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", {"transparency": (1, 2, 3)}, [255, 255, 255]),
        (PALETTE, "PNG", {"transparency": 0}, [255, 255, 255]),
        (PALETTE, "GIF", {"transparency": 0}, [255, 255, 255]),
        (PALETTE, "PNG", {}, [200, 0, 0]),
    ],
)
def test_transparent_places_are_white_whatever_colour_lies_under_them(image, kind, options, expected):
    assert opened(image, kind, **options)[0, 0].tolist() == expected
