"""The shapes world in motion: captions that ask for it, their split, and the rendering of videos.

An object moves in a direction, grows, shrinks, turns from one colour to another, or stays; of two objects one moves,
or both do, each its own way. Speed is constant, a colour changes at once, and nothing leaves the frame. Objects and
colours are those of the images (`flowrl/shapes.py`), so frames are verified as images are (`rewards/shapes_motion.py`).

Lengths are in pixels of the video; the centre of the top-left pixel is (0, 0).
"""

import itertools
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from flowrl import shapes
from flowrl.shapes import COLORS, SHAPES, ObjectSpec, Placed

TASKS = ("stay", "move", "size", "turn", "two", "both")
"""`two`: one of two objects moves, the other one stays. `both`: two move, in different directions."""
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""(x, y), y pointing down."""
FRAMES = 9
TRAVEL, GROWTH = 8.0, 1.6
"""How far an object moves from first to last frame, in pixels at 32 px, and the larger over the smaller radius."""
POOL = {"two": 400, "both": 200}
"""How many scenes of two objects are used of all that there are: under a third of all captions."""
HELD_OUT_SCENES = {"stay": 8, "move": 30, "size": 15, "turn": 32, "two": 110, "both": 55}
"""How many scenes of each task are never trained on; with their forms, 505 captions in all."""
TRAIN_SCENES = {"stay": 4, "move": 14, "size": 7, "turn": 15, "two": 50, "both": 25}
"""How many scenes of each task make the training prompts; all others are for pretraining."""

_REFERENCE_SIZE = 32
_RADII = {1: (5.5, 6.5, 7.5), 2: (5.0, 5.5, 6.0)}
_SMALL = 5.0
_RASTER = 2
# Objects are kept apart at these moments of the video, so that a placement does not depend on the number of frames.
_MOMENTS = np.linspace(0.0, 1.0, 17)
_OBJECT = rf"(?:a )?(?:({'|'.join(COLORS)}) )?({'|'.join(SHAPES)})"
_ACTION = (
    rf"(?:(?:moves|slides) ({'|'.join(DIRECTIONS)})|(stays|rests)|(grows|gets larger)|(shrinks|gets smaller)"
    rf"|(?:turns|changes) from ({'|'.join(COLORS)}) to ({'|'.join(COLORS)}))"
)
_CLAUSE = re.compile(rf"{_OBJECT} {_ACTION}")


@dataclass(frozen=True, slots=True)
class Actor:
    """An object and what it does: at most one of the three; none: it stays."""

    object: ObjectSpec
    """As it is in the first frame; colour None: any, which then stays."""
    direction: str | None = None
    growth: int = 0
    """1: grows, -1: shrinks."""
    turned: str | None = None
    """The colour of the last frame, where it is another one."""

    @property
    def stays(self) -> bool:
        """Whether nothing about it is asked to change."""
        return self.direction is None and not self.growth and self.turned is None

    def clause(self, article: str = "a", wording: int = 0) -> str:
        """Words such as "a red circle moves left", in one of two wordings."""
        if self.turned:
            verb = ("turns", "changes")[wording]
            return f"{ObjectSpec(self.object.shape).describe(article)} {verb} from {self.object.color} to {self.turned}"
        if self.direction:
            verb = f"{('moves', 'slides')[wording]} {self.direction}"
        elif self.growth:
            verb = (("grows", "gets larger") if self.growth > 0 else ("shrinks", "gets smaller"))[wording]
        else:
            verb = ("stays", "rests")[wording]
        return f"{self.object.describe(article)} {verb}"


@dataclass(frozen=True, slots=True)
class MovingScene:
    """The content of a caption: exactly these objects, each doing what it does."""

    task: str
    actors: tuple[Actor, ...]

    @property
    def forms(self) -> tuple[str, ...]:
        """Every caption of the scene in its lists, the plain one first: of single objects four, of two objects one."""
        if len(self.actors) == 1:
            return tuple(self.actors[0].clause(article, wording) for wording in (0, 1) for article in ("a", ""))
        return (" and ".join(actor.clause() for actor in self.actors),)

    @property
    def caption(self) -> str:
        """The plain caption."""
        return self.forms[0]

    @property
    def content(self) -> str:
        """What the caption asks for, whichever object it names first."""
        return " and ".join(sorted(actor.clause() for actor in self.actors))


def _all_scenes() -> Iterator[MovingScene]:
    colored = [ObjectSpec(s, c) for s in SHAPES for c in COLORS]
    objects = [ObjectSpec(s) for s in SHAPES] + colored
    yield from (MovingScene("stay", (Actor(o),)) for o in objects)
    yield from (MovingScene("move", (Actor(o, direction=d),)) for o in objects for d in DIRECTIONS)
    yield from (MovingScene("size", (Actor(o, growth=g),)) for o in objects for g in (1, -1))
    yield from (MovingScene("turn", (Actor(o, turned=c),)) for o in colored for c in COLORS if c != o.color)
    for a, b in itertools.product(colored, repeat=2):
        if a.color == b.color:
            continue
        yield from (MovingScene("two", (Actor(a, direction=d), Actor(b))) for d in DIRECTIONS)
        for first, second in itertools.permutations(DIRECTIONS, 2):
            yield MovingScene("both", (Actor(a, direction=first), Actor(b, direction=second)))


@cache
def scenes() -> dict[str, tuple[MovingScene, ...]]:
    """The scenes of the world by task, 916 in all, in the order of a hash of their content.

    Of those with two objects a part, in which the hash says as well which object is named first.
    """
    known: dict[str, dict[str, MovingScene]] = {task: {} for task in TASKS}
    for scene in _all_scenes():
        known[scene.task].setdefault(scene.content, scene)
    result: dict[str, tuple[MovingScene, ...]] = {}
    for task, group in known.items():
        ordered = [group[content] for content in sorted(group, key=_hash)][: POOL.get(task)]
        result[task] = tuple(
            replace(scene, actors=scene.actors[::-1] if _hash(scene.content) & 1 else scene.actors) for scene in ordered
        )
    return result


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def parse(caption: str) -> MovingScene:
    """The scene that a caption asks for, also one of two objects that no list has.

    Raises ValueError: the caption is not one of this world's.

    >>> parse("a red circle moves left").actors[0].direction
    'left'
    """
    actors = [_actor(clause) for clause in " ".join(caption.lower().split()).split(" and ")]
    scene = _scene([actor for actor in actors if actor is not None]) if None not in actors else None
    if scene is None:
        raise ValueError(
            f"caption {caption!r} asks for no motion of the shapes world; it looks like 'a red circle moves left', "
            "'a square grows', 'a cross turns from blue to red', 'a circle stays', 'a red circle moves left and a blue "
            "cross stays' or '... moves up' (two objects of different colours, not both in one direction)"
        )
    return scene


def _actor(clause: str) -> Actor | None:
    read = _CLAUSE.fullmatch(clause)
    if read is None:
        return None
    color, shape, direction, _, grows, shrinks, before, after = read.groups()
    if before:
        # The colours stand with the verb.
        fits = color is None and before != after
        return Actor(ObjectSpec(shape, before), turned=after) if fits else None
    return Actor(ObjectSpec(shape, color), direction=direction, growth=1 if grows else -1 if shrinks else 0)


def _scene(actors: list[Actor]) -> MovingScene | None:
    """The scene of these actors, None where the world has none such."""
    first = actors[0]
    if len(actors) == 1:
        return MovingScene(
            "turn" if first.turned else "size" if first.growth else "move" if first.direction else "stay", (first,)
        )
    colors = {actor.object.color for actor in actors}
    plain = len(actors) == 2 and not any(actor.growth or actor.turned for actor in actors)
    if not plain or None in colors or len(colors) != 2 or len({actor.direction for actor in actors}) != 2:
        return None
    return MovingScene("two" if any(actor.stays for actor in actors) else "both", tuple(actors))


@cache
def split(part: str) -> tuple[MovingScene, ...]:
    """The scenes of `part`, "train", "heldout" or "pretrain"; no two of them share a scene's content.

    The order is that of hashes of the captions, so it never depends on this file's order.
    """
    if part not in ("train", "heldout", "pretrain"):
        raise ValueError(f"part={part!r}; use 'train', 'heldout' or 'pretrain'")
    chosen: list[MovingScene] = []
    for task, group in scenes().items():
        first = HELD_OUT_SCENES[task]
        second = first + TRAIN_SCENES[task]
        spans = {"heldout": slice(first), "train": slice(first, second), "pretrain": slice(second, None)}
        chosen += group[spans[part]]
    return tuple(sorted(chosen, key=lambda scene: _hash(scene.caption[::-1])))


def prompts(part: str) -> list[str]:
    """Captions of `split(part)`; `assets/prompts/shapes-motion-*.txt` holds the same lines."""
    return [form for scene in split(part) for form in scene.forms]


def switches(frames: int) -> range:
    """The frames of the middle third, where an object that turns may have its new colour first.

    >>> list(switches(9))
    [3, 4, 5, 6]
    """
    return range(math.ceil(frames / 3), 2 * frames // 3 + 1)


@dataclass(frozen=True, slots=True)
class Course:
    """An object from the first frame to the last: where it starts and where it ends, at constant speed between."""

    start: Placed
    end: Placed
    switch: float = 0.5
    """Where in the middle third its colour changes, if it does, in [0, 1)."""

    def at(self, moment: float, color: str | None = None) -> Placed:
        """The object at a moment in [0, 1]."""
        a, b = self.start, self.end
        x, y, radius = (p + moment * (q - p) for p, q in ((a.x, b.x), (a.y, b.y), (a.radius, b.radius)))
        return Placed(a.shape, color or a.color, x, y, radius)


def place(scene: MovingScene, rng: np.random.Generator, size: int = _REFERENCE_SIZE) -> tuple[Course, ...]:
    """Draw courses, radii and unspecified colours for a scene, by rejection: objects never come near each other.

    The draw does not depend on the number of frames, and on the size by scaling alone.
    """
    scale = size / _REFERENCE_SIZE
    while True:
        courses = tuple(_course(actor, len(scene.actors), rng, scale) for actor in scene.actors)
        if all(_inside(p, scale) for course in courses for p in (course.start, course.end)) and all(
            shapes.apart([course.at(moment) for course in courses], scale)
            for moment in (_MOMENTS if len(courses) > 1 else ())
        ):
            return courses


def _course(actor: Actor, objects: int, rng: np.random.Generator, scale: float) -> Course:
    color = actor.object.color or COLORS[rng.integers(len(COLORS))]
    radii = _RADII[objects]
    radius = float(radii[rng.integers(len(radii))])
    x, y = rng.integers(2, _REFERENCE_SIZE // _RASTER - 1, 2) * float(_RASTER)
    dx, dy = DIRECTIONS[actor.direction] if actor.direction else (0, 0)
    first, last = radius, radius
    if actor.growth:
        first, last = (_SMALL, _SMALL * GROWTH)[:: actor.growth]
    start = Placed(actor.object.shape, color, x * scale, y * scale, first * scale)
    end = Placed(
        actor.object.shape, actor.turned or color, (x + dx * TRAVEL) * scale, (y + dy * TRAVEL) * scale, last * scale
    )
    return Course(start, end, float(rng.random()))


def _inside(p: Placed, scale: float) -> bool:
    """Whether the object stands in the frame as those of images do."""
    low, high = p.radius + 0.5 * scale, _REFERENCE_SIZE * scale - 1.5 * scale - p.radius
    return low <= min(p.x, p.y) and max(p.x, p.y) <= high


def frames_of(courses: tuple[Course, ...], frames: int = FRAMES) -> list[list[Placed]]:
    """The objects in every frame. Raises ValueError: fewer than two frames."""
    if frames < 2:
        raise ValueError(f"frames={frames}; a video of this world has 2 or more")
    middle = switches(frames)
    result: list[list[Placed]] = []
    for frame in range(frames):
        shown = [frame < middle[int(course.switch * len(middle))] for course in courses]
        moment = frame / (frames - 1)
        result.append([c.at(moment, (c.start if old else c.end).color) for c, old in zip(courses, shown, strict=True)])
    return result


def render(placed: list[list[Placed]], size: int = _REFERENCE_SIZE) -> np.ndarray:
    """Video of the objects of every frame, float32 [F, 3, size, size] in [0, 1]."""
    return np.stack([shapes.render(each, size) for each in placed])


def draw(scene: MovingScene, rng: np.random.Generator, frames: int = FRAMES, size: int = _REFERENCE_SIZE) -> np.ndarray:
    """A random video of a scene, float32 [F, 3, size, size] in [0, 1]."""
    return render(frames_of(place(scene, rng, size), frames), size)
