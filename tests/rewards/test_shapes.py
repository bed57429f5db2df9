"""The shapes world: captions, their split, placement and rendering."""

import itertools

import numpy as np
import pytest

from flowrl import shapes
from flowrl.shapes import RELATIONS, SHAPES, TASKS, Placed

ALL = [scene for group in shapes.scenes().values() for scene in group]


def draws(count: int, size: int, tasks: tuple[str, ...] = TASKS):
    """`count` (scene, placed objects) of each task."""
    rng = np.random.default_rng(7)
    for task, _ in itertools.product(tasks, range(count)):
        group = shapes.scenes()[task]
        scene = group[rng.integers(len(group))]
        yield scene, shapes.place(scene, rng, size)


def test_train_and_held_out_share_no_scene_and_no_caption():
    train, held_out = shapes.prompts("train"), shapes.prompts("heldout")
    assert len(train) == len(set(train)) == 236
    assert len(held_out) == len(set(held_out)) == 512
    assert not set(train) & set(held_out)
    assert not set(shapes.split("train")) & set(shapes.split("heldout"))
    with pytest.raises(ValueError, match="use 'train' or 'heldout'"):
        shapes.split("test")
    for part in ("train", "heldout"):
        assert {scene.task for scene in shapes.split(part)} == set(TASKS)
    assert set(train) | set(held_out) <= {form for scene in ALL for form in scene.forms}


def test_parse_returns_the_scene_of_every_caption():
    assert all(shapes.parse(form) == scene for scene in ALL for form in scene.forms)
    assert shapes.parse("  A Red   circle ") == shapes.parse("a red circle")


@pytest.mark.parametrize("caption", ["", "a red dog", "five circles", "a circle and a circle", "a red circle and"])
def test_a_foreign_caption_is_refused_with_examples(caption):
    with pytest.raises(ValueError, match="three squares"):
        shapes.parse(caption)


def signed_offsets(item: Placed, size: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.mgrid[0:size, 0:size]
    return columns - item.x, rows - item.y


@pytest.mark.parametrize("size", [32, 64])
def test_placed_objects_never_overlap_nor_leave_the_picture(size):
    # Finer than the pixels: corners that meet between pixel centres are seen as well.
    fine = 128 // size
    for scene, placed in draws(120, size):
        inside = []
        for item in placed:
            assert item.radius <= item.x <= size - 1 - item.radius
            assert item.radius <= item.y <= size - 1 - item.radius
            big = Placed(item.shape, item.color, item.x * fine, item.y * fine, item.radius * fine)
            # Half a pixel of rim around each: no pixel is tinted by two objects.
            inside.append(shapes.distance(item.shape, *signed_offsets(big, size * fine), big.radius) < 0.5 * fine)
        assert np.sum(inside, axis=0).max() == 1, scene.caption


def test_placed_objects_are_those_of_the_scene_and_their_relation_holds():
    for scene, placed in draws(100, 32):
        assert [p.shape for p in placed] == [o.shape for o in scene.objects]
        assert all(o.color in (None, p.color) for o, p in zip(scene.objects, placed, strict=True))
        if scene.relation:
            assert shapes.holds(scene.relation, *[(p.x, p.y) for p in placed])


def test_the_same_seed_draws_the_same_picture_and_another_seed_another():
    scene = shapes.parse("three squares")
    first, again, other = (shapes.draw(scene, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [3.6, 9.0, 20.0])
def test_coverage_has_the_declared_area_and_centroid(shape, radius):
    item = Placed(shape, "red", 24.3, 23.8, radius)
    alpha = shapes.coverage(shape, *signed_offsets(item, 48), radius)
    rows, _ = np.mgrid[0:48, 0:48]
    # The antialiased rim rounds corners: within 4 % of the area and 0.15 px of the centroid.
    assert alpha.sum() == pytest.approx(shapes.AREA[shape] * radius**2, rel=0.04)
    center = (alpha * rows).sum() / alpha.sum()
    assert center == pytest.approx(item.y + shapes.CENTROID_Y[shape] * radius, abs=0.15)


def test_render_paints_the_colour_inside_and_the_background_outside():
    picture = shapes.render([Placed("circle", "cyan", 16.0, 10.0, 6.0)], 32)
    assert picture.shape == (3, 32, 32)
    assert picture.dtype == np.float32
    np.testing.assert_allclose(picture[:, 10, 16], shapes.PALETTE["cyan"], rtol=1e-6)
    np.testing.assert_allclose(picture[:, 28, 3], shapes.BACKGROUND, rtol=1e-6)


def test_a_relation_and_its_opposite_hold_for_swapped_arguments_and_never_together():
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    points = np.random.default_rng(0).uniform(0, 32, (300, 2, 2))
    assert set(opposite) == set(RELATIONS)
    for relation, inverse in opposite.items():
        truths = [shapes.holds(relation, a, b) for a, b in points]
        # A quarter of all directions: the test would see a relation that always or never holds.
        assert 0.15 < np.mean(truths) < 0.35
        assert not shapes.holds(relation, (3.0, 3.0), (3.0, 3.0)), "its own place"
        for dx, dy in itertools.product((-5.0, 5.0), (-5.0, -4.7, 4.7, 5.0)):
            assert not shapes.holds(relation, (dx, dy), (0.0, 0.0)), "a diagonal"
        for (a, b), truth in zip(points, truths, strict=True):
            assert truth == shapes.holds(inverse, b, a)
            assert not (truth and shapes.holds(relation, b, a))
            assert not (truth and shapes.holds(inverse, a, b))
