"""The verifier of the shapes world against rendered truth and against near misses.

`python tests/rewards/test_rewards_shapes.py [pictures]` prints the accuracy table (by kind, size and pixel noise).
"""

import functools
import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from flowrl.rewards._shapes.eye import detect_all
from flowrl.rewards.shapes import BLOB, Config, Found, build, detect, score_scene
from scipy import ndimage

from flowrl import shapes
from flowrl.reward import RewardError
from flowrl.shapes import BACKGROUND, COLORS, PALETTE, RELATIONS, SHAPES, TASKS, ObjectSpec, Placed, Scene
from tests.tiny_rewards import scored

NOISES = (0.0, 0.03, 0.08)
WHEEL = ("red", "yellow", "green", "cyan", "blue", "purple")
Drawn = tuple[Scene, list[Placed]]


def fulfils(scene: Scene, placed: list[Placed]) -> bool:
    """Ground truth from the geometry alone: does what was placed show exactly what the scene asks for?"""
    if len(placed) != len(scene.objects):
        return False
    for order in itertools.permutations(placed):
        fits = all(o.shape == p.shape and o.color in (None, p.color) for o, p in zip(scene.objects, order, strict=True))
        if fits and (scene.relation is None or shapes.holds(scene.relation, *[(p.x, p.y) for p in order])):
            return True
    return False


@functools.cache
def grid(size: int) -> np.ndarray:
    """Rows and columns, [2, size, size]."""
    return np.mgrid[0:size, 0:size].astype(np.float32)


def paint(placed: list[Placed], size: int) -> np.ndarray:
    """Like `shapes.render`, with colours that may also be RGB triples."""
    rows, columns = grid(size)
    image = np.full((3, size, size), BACKGROUND, dtype=np.float32)
    for p in placed:
        alpha = shapes.coverage(p.shape, columns - p.x, rows - p.y, p.radius)
        rgb = np.asarray(PALETTE[p.color] if isinstance(p.color, str) else p.color, dtype=np.float32)
        image = image * (1 - alpha) + rgb[:, None, None] * alpha
    return image


def noisy(image: np.ndarray, std: float, rng: np.random.Generator) -> np.ndarray:
    return np.clip(image + rng.normal(0, std, image.shape), 0, 1).astype(np.float32)


def pick(rng, items):
    return items[rng.integers(len(items))]


def drawn(rng, size, tasks=TASKS) -> Drawn:
    scene = pick(rng, shapes.scenes()[pick(rng, tasks)])
    return scene, list(shapes.place(scene, rng, size))


def inside(p: Placed, size: int) -> bool:
    margin = 1.1 * p.radius
    return margin <= min(p.x, p.y) and max(p.x, p.y) <= size - 1 - margin


def cover(p: Placed, size: int, rim: float = 0.0) -> np.ndarray:
    rows, columns = grid(size)
    return shapes.distance(p.shape, columns - p.x, rows - p.y, p.radius) < rim


def apart(placed: list[Placed], size: int) -> bool:
    return np.sum([cover(p, size, 1.25 * size / 32) for p in placed], axis=0).max() <= 1


def missing(rng, size) -> Drawn:
    scene, placed = drawn(rng, size)
    placed.pop(rng.integers(len(placed)))
    return scene, placed


def extra(rng, size, color=None) -> Drawn:
    while True:
        scene, placed = drawn(rng, size)
        for _ in range(20):
            radius = rng.uniform(3.6, 6) * size / 32
            x, y = rng.uniform(1.1 * radius, size - 1 - 1.1 * radius, 2)
            more = Placed(pick(rng, SHAPES), color or pick(rng, COLORS), x, y, radius)
            if apart([*placed, more], size):
                return scene, [*placed, more]


def grey_extra(rng, size) -> Drawn:
    return extra(rng, size, color=(rng.uniform(0.45, 1.0),) * 3)


def white_extra(rng, size) -> Drawn:
    return extra(rng, size, color=(1.0, 1.0, 1.0))


def halfway(first: str, second: str, rng) -> tuple[float, ...]:
    """A hue about halfway between two of the palette, as bright as they are."""
    a, b = (np.asarray(PALETTE[name]) - BACKGROUND for name in (first, second))
    share = rng.uniform(0.4, 0.6)
    mixed = (1 - share) * a / np.linalg.norm(a) + share * b / np.linalg.norm(b)
    return tuple(BACKGROUND + (1 - BACKGROUND) * mixed / mixed.max())


def halfway_extra(rng, size) -> Drawn:
    turn = rng.integers(6)
    return extra(rng, size, color=halfway(WHEEL[turn], WHEEL[turn - 1], rng))


def altered(rng, size, change) -> Drawn:
    """A scene with one object changed by `change(spec, placed)`, until that is a miss."""
    while True:
        scene, placed = drawn(rng, size)
        k = rng.integers(len(placed))
        placed[k] = change(scene.objects[k], placed[k])
        if not fulfils(scene, placed) and apart(placed, size):
            return scene, placed


def wrong_color(rng, size) -> Drawn:
    return altered(rng, size, lambda spec, p: replace(p, color=pick(rng, COLORS)) if spec.color else p)


def wrong_shape(rng, size) -> Drawn:
    return altered(rng, size, lambda spec, p: replace(p, shape=pick(rng, SHAPES)))


def halfway_color(rng, size) -> Drawn:
    def change(spec: ObjectSpec, p: Placed) -> Placed:
        neighbour = WHEEL[(WHEEL.index(p.color) + pick(rng, (-1, 1))) % 6]
        return replace(p, color=halfway(p.color, neighbour, rng)) if spec.color else p

    return altered(rng, size, change)


def swapped_relation(rng, size) -> Drawn:
    while True:
        scene, placed = drawn(rng, size, ("position",))
        asked = replace(scene, relation=pick(rng, tuple(RELATIONS)))
        if not fulfils(asked, placed):
            return asked, placed


def swapped_binding(rng, size) -> Drawn:
    while True:
        scene, (a, b) = drawn(rng, size, ("two", "binding", "position"))
        placed = [replace(a, color=b.color), replace(b, color=a.color)]
        if not fulfils(scene, placed):
            return scene, placed


def grown_onto(rng, size, p: Placed, shape: str, others: list[Placed]) -> Placed | None:
    """A twin of `p` in its colour that overlaps it and adds at least 40 % of its area, clear of the others."""
    radius = p.radius * rng.uniform(0.8, 1.2)
    step, angle = rng.uniform(0.5, 0.7) * (p.radius + radius), rng.uniform(0, 2 * np.pi)
    twin = Placed(shape, p.color, p.x + step * np.cos(angle), p.y + step * np.sin(angle), radius)
    own, new = cover(p, size), cover(twin, size)
    # Both pieces hang together when they share pixels.
    real = (own & new).sum() >= 3 and (new & ~own).sum() >= 0.4 * own.sum()
    return twin if real and inside(twin, size) and all(apart([twin, q], size) for q in others) else None


def merged_pair(rng, size) -> Drawn:
    """Two of the asked-for objects in one piece: one piece too few."""
    while True:
        scene, placed = drawn(rng, size, ("counting",))
        first, second, *others = placed
        twin = grown_onto(rng, size, first, second.shape, others)
        if twin:
            return scene, [first, twin, *others]


def merged_extra(rng, size) -> Drawn:
    """One asked-for object has grown together with another one: the number of pieces is right."""
    while True:
        scene, placed = drawn(rng, size)
        k = rng.integers(len(placed))
        twin = grown_onto(rng, size, placed[k], pick(rng, SHAPES), placed[:k] + placed[k + 1 :])
        if twin:
            return scene, [*placed, twin]


def empty(rng, size) -> Drawn:
    return drawn(rng, size)[0], []


NEAR_MISSES = (
    missing,
    extra,
    wrong_color,
    wrong_shape,
    swapped_relation,
    swapped_binding,
    merged_pair,
    merged_extra,
    grey_extra,
    white_extra,
    halfway_extra,
    halfway_color,
    empty,
)


def static(rng, size) -> np.ndarray:
    return rng.uniform(0, 1, (3, size, size)).astype(np.float32)


def grain(rng, size) -> np.ndarray:
    return noisy(np.full((3, size, size), BACKGROUND), 0.3, rng)


def clouds(rng, size) -> np.ndarray:
    field = ndimage.gaussian_filter(rng.normal(size=(3, size, size)), (0, size / 16, size / 16))
    return np.clip(0.3 + 0.4 * field / field.std(), 0, 1).astype(np.float32)


NOISE_PICTURES = (static, grain, clouds)


def strict_of(scene: Scene, image: np.ndarray) -> float:
    return score_scene(scene, detect(image))[0]


def accepted(scenes: Sequence[Scene], images: Iterable[np.ndarray]) -> float:
    """Share of the pictures that show what their scenes ask for."""
    found = detect_all(np.stack(list(images)))
    return float(np.mean([score_scene(*pair)[0] for pair in zip(scenes, found, strict=True)]))


def accuracy_on_truth(task: str, size: int, pictures: int) -> dict[float, float]:
    """Noise -> share of true pictures that are accepted; the pictures are the same at every noise."""
    rng = np.random.default_rng(11)
    scenes = [pick(rng, shapes.scenes()[task]) for _ in range(pictures)]
    images = [shapes.draw(scene, rng, size) for scene in scenes]
    return {std: accepted(scenes, [noisy(image, std, rng) for image in images]) for std in NOISES}


def accuracy_on_misses(kind, size: int, noises: tuple[float, ...], pictures: int) -> float:
    """Share of near misses that are refused; the noises take turns."""
    rng = np.random.default_rng(13)
    misses = [kind(rng, size) for _ in range(pictures)]
    images = [
        noisy(paint(placed, size), std, rng) for (_, placed), std in zip(misses, itertools.cycle(noises), strict=False)
    ]
    return 1 - accepted([scene for scene, _ in misses], images)


def accuracy_on_noise(kind, size: int, pictures: int) -> float:
    rng = np.random.default_rng(17)
    drawn_scenes = [drawn(rng, size)[0] for _ in range(pictures)]
    return 1 - accepted(drawn_scenes, [kind(rng, size) for _ in drawn_scenes])


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("task", TASKS)
def test_rendered_truth_is_accepted(task, size):
    accuracy = accuracy_on_truth(task, size, 200 if size == 32 else 100)
    assert min(accuracy.values()) >= 0.995, accuracy


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("kind", NEAR_MISSES, ids=lambda kind: kind.__name__)
def test_near_misses_are_refused(kind, size):
    assert accuracy_on_misses(kind, size, NOISES, 250 if size == 32 else 100) >= 0.995


@pytest.mark.parametrize("kind", NOISE_PICTURES, ids=lambda kind: kind.__name__)
def test_noise_is_refused(kind):
    assert accuracy_on_noise(kind, 32, 200) >= 0.995


def test_objects_are_found_where_they_were_drawn():
    rng = np.random.default_rng(3)
    for _ in range(60):
        _, placed = drawn(rng, 32)
        found = detect(shapes.render(placed, 32))
        for p in placed:
            near = min(found, key=lambda f: math.hypot(f.x - p.x, f.y - p.y))
            assert (near.shape, near.color) == (p.shape, p.color)
            # The rounded corners of the antialiased rim shift a triangle's fitted centre a little.
            assert math.hypot(near.x - p.x, near.y - p.y) < 0.25


def test_counted_objects_may_have_any_colours():
    placed = [Placed("square", color, x, 16.0, 4.0) for color, x in (("red", 6.0), ("cyan", 16.0), ("yellow", 26.0))]
    assert strict_of(shapes.parse("three squares"), shapes.render(placed)) == 1
    assert strict_of(shapes.parse("three red squares"), shapes.render(placed)) == 0


RED_CIRCLE, BLUE_CROSS = Found("circle", "red", 8.0, 16.0), Found("cross", "blue", 24.0, 16.0)


@pytest.mark.parametrize(
    ("caption", "found", "strict", "partial"),
    [
        ("a red circle", [RED_CIRCLE], 1, 1.0),
        ("a red circle", [], 0, 0.0),
        ("a red circle", [Found("square", "red", 8, 8)], 0, 0.5),
        ("a red circle", [Found("circle", "blue", 8, 8)], 0, 0.25),
        ("a red circle", [Found(BLOB, None, 8, 8)], 0, 0.0),
        ("a circle", [Found("circle", "blue", 8, 8)], 1, 1.0),
        ("a circle", [Found("square", "red", 8, 8)], 0, 0.0),
        ("a red circle", [BLUE_CROSS, RED_CIRCLE], 0, 0.75),
        ("a red circle", [BLUE_CROSS] * 8 + [RED_CIRCLE], 0, 0.5),
        ("two circles", [RED_CIRCLE], 0, 0.5),
        ("a red circle and a blue cross", [BLUE_CROSS, RED_CIRCLE], 1, 1.0),
        ("a blue circle and a red cross", [BLUE_CROSS, RED_CIRCLE], 0, 0.5),
        ("a red circle left of a blue cross", [BLUE_CROSS, RED_CIRCLE], 1, 1.0),
        ("a red circle right of a blue cross", [BLUE_CROSS, RED_CIRCLE], 0, 0.6),
        ("a red circle left of a blue cross", [RED_CIRCLE], 0, 0.3),
        ("a red circle left of a yellow square", [BLUE_CROSS, RED_CIRCLE], 0, 0.3),
        ("a red circle left of a blue cross", [RED_CIRCLE, BLUE_CROSS, BLUE_CROSS], 0, 0.85),
        # The relation is one between shapes: two bars have none, in whatever colours.
        ("a red circle left of a blue cross", [Found(BLOB, "red", 8, 16), Found(BLOB, "blue", 24, 16)], 0, 0.3),
        ("a red circle left of a blue cross", [Found(BLOB, "red", 8, 16), BLUE_CROSS], 0, 0.45),
        ("a red circle left of a blue cross", [RED_CIRCLE, Found("cross", "green", 24, 16)], 0, 0.775),
        ("a red circle left of a blue cross", [RED_CIRCLE, Found("cross", "blue", 24, 32)], 0, 0.6),
        ("a red circle above a blue cross", [RED_CIRCLE, Found("cross", "blue", 24, 32)], 0, 0.6),
    ],
)
def test_strict_and_partial_score_of_given_objects(caption, found, strict, partial):
    assert score_scene(shapes.parse(caption), found) == (strict, pytest.approx(partial))


def test_partial_is_a_share_and_is_one_exactly_where_strict_is():
    rng = np.random.default_rng(5)
    seen = set()
    for kind in (*NEAR_MISSES, drawn):
        for _ in range(12):
            scene, placed = kind(rng, 32)
            strict, partial = score_scene(scene, detect(noisy(paint(placed, 32), 0.03, rng)))
            assert 0 <= partial <= 1
            assert (partial == 1) == (strict == 1)
            seen.add(strict)
    assert seen == {0.0, 1.0}


def test_a_missing_object_lowers_the_partial_score():
    rng = np.random.default_rng(6)
    for _ in range(60):
        scene, placed = missing(rng, 32)
        assert score_scene(scene, detect(paint(placed, 32)))[1] <= 0.75


def test_a_drawn_image_fulfils_its_prompt_and_a_foreign_prompt_stops():
    reward = build(Config())
    image = torch.from_numpy(shapes.draw(shapes.parse("a circle"), np.random.default_rng(0)))[None]
    assert scored(reward, image, ["a circle"])["shapes_strict"].item() == 1
    with pytest.raises(RewardError, match="not of the shapes world"):
        scored(reward, image, ["a photo of a dog"])


def print_table(pictures: int) -> None:
    print(f"{'size':>4} {'kind':<18}" + "".join(f" noise {std:<5}" for std in NOISES) + f"  ({pictures} pictures each)")
    for size in (32, 64):
        for task in TASKS:
            values = accuracy_on_truth(task, size, pictures).values()
            print(f"{size:>4} truth {task:<12}" + "".join(f" {value:<11.4f}" for value in values))
        for kind in NEAR_MISSES:
            values = [accuracy_on_misses(kind, size, (std,), pictures) for std in NOISES]
            print(f"{size:>4} {kind.__name__:<18}" + "".join(f" {value:<11.4f}" for value in values))
        for kind in NOISE_PICTURES:
            print(f"{size:>4} {kind.__name__:<18} {accuracy_on_noise(kind, size, pictures):.4f}")
        rng = np.random.default_rng(17)
        scenes = [drawn(rng, size) for _ in range(256)]
        images = [shapes.render(placed, size) for _, placed in scenes]
        start = time.process_time()
        accepted([scene for scene, _ in scenes], images)
        print(f"{size:>4} detect and judge: {(time.process_time() - start) / len(scenes) * 1e3:.3f} ms a picture")


if __name__ == "__main__":
    print_table(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
