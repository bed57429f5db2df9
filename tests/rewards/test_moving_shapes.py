"""The shapes world in motion: captions, their split, placement and rendering."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from flowrl import moving_shapes, shapes
from flowrl.data.prompt_sources import load_prompts
from flowrl.moving_shapes import DIRECTIONS, TASKS

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts"
PARTS = ("train", "heldout", "pretrain")


def two(scene) -> bool:
    return len(scene.actors) == 2


def test_the_parts_share_no_content_and_two_objects_are_a_third_at_most():
    contents = {part: {scene.content for scene in moving_shapes.split(part)} for part in PARTS}
    assert sum(map(len, contents.values())) == len(set.union(*contents.values())) == 916
    for part in PARTS:
        captions = moving_shapes.prompts(part)
        assert len(captions) == len(set(captions))
        assert sum(" and " in caption for caption in captions) <= len(captions) / 3
        assert {scene.task for scene in moving_shapes.split(part)} == set(TASKS)
    assert len(moving_shapes.prompts("heldout")) == 505
    with pytest.raises(ValueError, match="use 'train', 'heldout' or 'pretrain'"):
        moving_shapes.split("test")


@pytest.mark.parametrize("part", PARTS[:2])
@pytest.mark.parametrize(("world", "name"), [(shapes, ""), (moving_shapes, "motion-")], ids=["images", "videos"])
def test_the_prompt_files_and_the_prompt_source_hold_what_the_code_gives(world, name, part):
    captions = world.prompts(part)
    assert (PROMPTS / f"shapes-{name}{part}.txt").read_text(encoding="ascii").splitlines() == captions
    assert [p.text for p in load_prompts(f"shapes:{name}{part}", "data.prompts")] == captions


def test_parse_returns_the_scene_of_every_caption_in_either_order():
    for scene in itertools.chain(*moving_shapes.scenes().values()):
        assert all(moving_shapes.parse(form) == scene for form in scene.forms)
        if two(scene):
            swapped = " and ".join(reversed(scene.caption.split(" and ")))
            assert moving_shapes.parse(swapped).content == scene.content
            assert moving_shapes.parse(swapped).task == scene.task
    assert moving_shapes.parse("  A Red   circle MOVES left ").actors[0].direction == "left"


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a red circle",
        "a red circle moves",
        "a red dog stays",
        "a red square turns from blue to red",
        "a square turns from red to red",
        "a red circle stays and a blue square stays",
        "a red circle moves up and a blue square moves up",
        "a red circle moves up and a red square stays",
        "a circle moves up and a blue square stays",
        "a red circle grows and a blue square stays",
        "a red circle stays and",
    ],
)
def test_a_foreign_caption_is_refused_with_examples(caption):
    with pytest.raises(ValueError, match="'a square grows'"):
        moving_shapes.parse(caption)


@pytest.mark.parametrize("size", [32, 64])
def test_objects_do_what_is_asked_apart_and_inside_the_frame(size):
    rng, cell = np.random.default_rng(7), size / 32
    for task, _ in itertools.product(TASKS, range(25)):
        group = moving_shapes.scenes()[task]
        scene = group[rng.integers(len(group))]
        frames = moving_shapes.frames_of(moving_shapes.place(scene, rng, size), 7)
        for k, actor in enumerate(scene.actors):
            track = [placed[k] for placed in frames]
            xy, radii = np.asarray([(p.x, p.y) for p in track]), np.asarray([p.radius for p in track])
            step = np.asarray(DIRECTIONS[actor.direction] if actor.direction else (0, 0)) * 8 * cell / 6
            # Whole and half pixels and sixths of them: a few units in the last place.
            np.testing.assert_allclose(np.diff(xy, axis=0), np.tile(step, (6, 1)), atol=1e-9)
            np.testing.assert_allclose(np.diff(radii), actor.growth * 3 * cell / 6, atol=1e-9)
            colors = [p.color for p in track]
            if actor.turned:
                assert colors.index(actor.turned) in moving_shapes.switches(7)
                assert colors == sorted(colors, key=[actor.object.color, actor.turned].index)
            else:
                assert len(set(colors)) == 1
                assert actor.object.color in (None, colors[0])
            assert (xy - radii[:, None]).min() >= 0
            assert (xy + radii[:, None]).max() <= size - 1
        assert all(shapes.apart(placed, cell) for placed in frames)


def test_a_placement_is_the_same_at_every_number_of_frames_and_other_with_another_seed():
    scene = moving_shapes.parse("a red circle moves left and a blue square stays")
    short, long, other = (
        moving_shapes.draw(scene, np.random.default_rng(seed), frames) for seed, frames in ((0, 5), (0, 9), (1, 5))
    )
    assert short.shape == (5, 3, 32, 32)
    assert short.dtype == np.float32
    # Every second frame of the longer one: its moments are the same, exactly.
    assert np.array_equal(short, long[::2])
    assert not np.array_equal(short, other)
    with pytest.raises(ValueError, match="2 or more"):
        moving_shapes.draw(scene, np.random.default_rng(0), 1)
