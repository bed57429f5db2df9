"""Videos of the shapes world that nearly show what their captions ask for, and junk: what the verifier must refuse."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from flowrl import moving_shapes, shapes
from flowrl.moving_shapes import DIRECTIONS, FRAMES, TASKS, Actor, Course, MovingScene, switches
from flowrl.shapes import COLORS, PALETTE, SHAPES, Placed
from tests.rewards.test_rewards_shapes import NOISE_PICTURES, apart, inside, paint, pick
from tests.rewards.test_shapes_eye import JUNK, Canvas

Given = tuple[MovingScene, np.ndarray]
"""A caption's scene and a video [F, 3, H, W]."""
Frames = list[list[Placed]]
_MILLISECONDS = 100
MOVING = tuple(task for task in TASKS if task != "stay")


def some_scene(rng: np.random.Generator, tasks: tuple[str, ...] = TASKS) -> MovingScene:
    return pick(rng, moving_shapes.scenes()[pick(rng, tasks)])


def drawn(rng, size, tasks=TASKS) -> tuple[MovingScene, Frames]:
    scene = some_scene(rng, tasks)
    return scene, moving_shapes.frames_of(moving_shapes.place(scene, rng, size))


def painted(frames: Frames, size: int) -> np.ndarray:
    return np.stack([paint(placed, size) for placed in frames])


def true(rng, size) -> Given:
    scene, frames = drawn(rng, size)
    return scene, painted(frames, size)


def acted(scene: MovingScene, actors: list[Actor], rng, size) -> Given:
    """A video of other actors under the scene's caption."""
    return scene, painted(
        moving_shapes.frames_of(moving_shapes.place(replace(scene, actors=tuple(actors)), rng, size)), size
    )


def wrong_direction(rng, size) -> Given:
    scene = some_scene(rng, ("move", "two", "both"))
    actors = list(scene.actors)
    k = pick(rng, [i for i, actor in enumerate(actors) if actor.direction])
    actors[k] = replace(actors[k], direction=pick(rng, [d for d in DIRECTIONS if d != actors[k].direction]))
    return acted(scene, actors, rng, size)


def other_moves(rng, size) -> Given:
    scene = some_scene(rng, ("two",))
    a, b = scene.actors
    return acted(scene, [replace(a, direction=b.direction), replace(b, direction=a.direction)], rng, size)


def both_move(rng, size) -> Given:
    scene = some_scene(rng, ("two",))
    moving = [a if a.direction else replace(a, direction=pick(rng, tuple(DIRECTIONS))) for a in scene.actors]
    return acted(scene, moving, rng, size)


def only_one_moves(rng, size) -> Given:
    scene = some_scene(rng, ("both",))
    a, b = scene.actors
    return acted(scene, [replace(a, direction=None), b], rng, size)


def teleport(rng, size) -> Given:
    """An object jumps by 5 cells or more, for good or for a frame."""
    cell = size / 32
    while True:
        scene, frames = drawn(rng, size)
        k, first = rng.integers(len(scene.actors)), int(rng.integers(1, FRAMES))
        last = FRAMES if rng.random() < 0.5 else first + 1
        turn, far = rng.uniform(0, 2 * np.pi), rng.uniform(5, 12) * cell
        for placed in frames[first:last]:
            placed[k] = replace(placed[k], x=placed[k].x + far * np.cos(turn), y=placed[k].y + far * np.sin(turn))
        if all(inside(placed[k], size) and apart(placed, size) for placed in frames[first:last]):
            return scene, painted(frames, size)


def span(rng, most: int = 3) -> range:
    """One to `most` frames in the middle of a video."""
    first = int(rng.integers(1, FRAMES - 1))
    return range(first, min(first + int(rng.integers(1, most + 1)), FRAMES - 1))


def color_flicker(rng, size) -> Given:
    scene, frames = drawn(rng, size)
    k = rng.integers(len(scene.actors))
    own = {placed[k].color for placed in frames}
    other = pick(rng, [color for color in COLORS if color not in own])
    for frame in span(rng):
        frames[frame][k] = replace(frames[frame][k], color=other)
    return scene, painted(frames, size)


def shape_flicker(rng, size) -> Given:
    while True:
        scene, frames = drawn(rng, size)
        k = rng.integers(len(scene.actors))
        other = pick(rng, [shape for shape in SHAPES if shape != frames[0][k].shape])
        for frame in span(rng):
            frames[frame][k] = replace(frames[frame][k], shape=other)
        if all(apart(placed, size) for placed in frames):
            return scene, painted(frames, size)


def lost(rng, size) -> Given:
    scene, frames = drawn(rng, size)
    k = rng.integers(len(scene.actors))
    for frame in span(rng):
        del frames[frame][k]
    return scene, painted(frames, size)


def added(rng, size) -> Given:
    """One more object, from one frame to all of them."""
    while True:
        scene, frames = drawn(rng, size)
        radius = rng.uniform(3.6, 6) * size / 32
        x, y = rng.uniform(1.1 * radius, size - 1 - 1.1 * radius, 2)
        more = Placed(pick(rng, SHAPES), pick(rng, COLORS), x, y, radius)
        for frame in range(FRAMES) if rng.random() < 0.5 else span(rng):
            frames[frame].append(more)
        if all(apart(placed, size) for placed in frames):
            return scene, painted(frames, size)


def frozen(rng, size) -> Given:
    scene, frames = drawn(rng, size, MOVING)
    return scene, painted([pick(rng, frames)] * FRAMES, size)


def too_small(rng, size) -> Given:
    """Motion of at most 3 cells, sizes that change by at most 0.18."""
    scene = some_scene(rng, ("move", "size", "two", "both"))
    courses = list(moving_shapes.place(scene, rng, size))
    k = pick(rng, [i for i, actor in enumerate(scene.actors) if not actor.stays])
    courses[k] = less(courses[k], rng.uniform(0, 3 / 8) if scene.actors[k].direction else rng.uniform(0, 0.3))
    return scene, painted(moving_shapes.frames_of(tuple(courses)), size)


def less(course: Course, share: float) -> Course:
    """A course that ends after this share of itself."""
    return replace(course, end=replace(course.at(share), color=course.end.color))


def reversed_video(rng, size) -> Given:
    scene, frames = drawn(rng, size, MOVING)
    return scene, painted(frames[::-1], size)


def turned_at_another_time(rng, size) -> Given:
    """A colour that changes outside of the middle third."""
    scene, frames = drawn(rng, size, ("turn",))
    middle = switches(FRAMES)
    switch = pick(rng, [frame for frame in range(FRAMES + 1) if frame not in middle])
    (actor,) = scene.actors
    for frame, placed in enumerate(frames):
        placed[0] = replace(placed[0], color=str(actor.object.color if frame < switch else actor.turned))
    return scene, painted(frames, size)


def faded(rng, size) -> Given:
    """A colour that changes bit by bit."""
    scene, frames = drawn(rng, size, ("turn",))
    (actor,) = scene.actors
    a, b = (np.asarray(PALETTE[str(color)]) for color in (actor.object.color, actor.turned))
    for frame, placed in enumerate(frames):
        placed[0] = replace(placed[0], color=tuple(a + frame / (FRAMES - 1) * (b - a)))
    return scene, painted(frames, size)


def exchanged(rng, size) -> Given:
    """Two objects that exchange their places in mid-video, or their colours."""
    while True:
        scene, frames = drawn(rng, size, ("two", "both"))
        colors = rng.random() < 0.5
        for placed in frames[int(rng.integers(2, FRAMES - 1)) :]:
            a, b = placed
            if colors:
                placed[:] = [replace(a, color=b.color), replace(b, color=a.color)]
            else:
                placed[:] = [replace(a, x=b.x, y=b.y), replace(b, x=a.x, y=a.y)]
        if all(apart(placed, size) and all(inside(p, size) for p in placed) for placed in frames):
            return scene, painted(frames, size)


MISSES: tuple[Callable[..., Given], ...] = (
    wrong_direction,
    other_moves,
    both_move,
    only_one_moves,
    teleport,
    color_flicker,
    shape_flicker,
    lost,
    added,
    frozen,
    too_small,
    reversed_video,
    turned_at_another_time,
    faded,
    exchanged,
)


class Frame(Canvas):
    """A right frame of a video, on which junk of images is drawn."""

    def __init__(self, rng: np.random.Generator, size: int, placed: list[Placed]) -> None:
        self.rng, self.size, self.cell = rng, size, size // 32
        self.scene, self.placed = shapes.parse("a square"), placed
        self.image = paint(placed, size)


def junk(kind: Callable[[Canvas], np.ndarray], rng, size) -> Given:
    """A true video with junk of images on every frame: the same on all, or, half of the time, drawn anew."""
    scene, frames = drawn(rng, size)
    seed, same = int(rng.integers(2**31)), rng.random() < 0.5 or kind.__name__ == "full_frame"
    canvases = [Frame(np.random.default_rng(seed if same else (seed, i)), size, p) for i, p in enumerate(frames)]
    video = np.stack([kind(canvas) for canvas in canvases]).astype(np.float32)
    if kind.__name__ == "full_frame":
        scene = moving_shapes.parse(f"{canvases[0].scene.caption} stays")
    return scene, video


def noise_alone(kind: Callable[..., np.ndarray], rng, size) -> Given:
    """A caption and noise of images: the same on all frames, or, half of the time, drawn anew."""
    images = [kind(rng, size) for _ in range(FRAMES if rng.random() < 0.5 else 1)]
    return some_scene(rng), np.stack(images * (FRAMES // len(images)))


def webp(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Through an animated WebP file of quality 90."""
    frames = [Image.fromarray(f) for f in (video.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], quality=90, duration=_MILLISECONDS)
    read: list[np.ndarray] = []
    pixels = np.zeros(0)
    with Image.open(file) as image:
        for frame in range(getattr(image, "n_frames", 1)):
            image.seek(frame)
            # The file holds a frame that is the one before as more of its time.
            pixels = np.asarray(image.convert("RGB"))
            read += [pixels] * round(image.info.get("duration", 0) / _MILLISECONDS)
    read = read or [pixels] * len(video)  # one frame alone has no time
    assert len(read) == len(video)
    return np.stack(read).transpose(0, 3, 1, 2).astype(np.float32) / 255


def grain(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """With noise of std 0.05."""
    return np.clip(video + rng.normal(0, 0.05, video.shape), 0, 1).astype(np.float32)


def as_is(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.clip(video, 0, 1).astype(np.float32)


CHANGES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "as rendered": as_is,
    "WebP 90": webp,
    "noise 0.05": grain,
}
KINDS: dict[str, Callable[..., Given]] = (
    {kind.__name__: kind for kind in MISSES}
    | {kind.__name__: lambda rng, size, kind=kind: junk(kind, rng, size) for kind in JUNK}
    | {kind.__name__: lambda rng, size, kind=kind: noise_alone(kind, rng, size) for kind in NOISE_PICTURES}
)
