"""The captioned-shapes world: six tasks in the manner of GenEval, their captions, and a renderer.

A scene is a handful of non-overlapping flat shapes on a near-black background. The dark background
is deliberate: antialiased edge pixels keep the hue of their shape, so an image can be verified by
colour and geometry alone (`rewards/shapes.py`).

Lengths are in pixels of the image; the centre of the top-left pixel is (0, 0).
"""

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SHAPES = ("circle", "square", "triangle", "cross")
PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.9, 0.1),
    "blue": (0.15, 0.15, 1.0),
    "yellow": (1.0, 1.0, 0.1),
    "purple": (1.0, 0.1, 1.0),
    "cyan": (0.1, 1.0, 1.0),
}
COLORS = tuple(PALETTE)
BACKGROUND = 0.06
NUMBERS = {"two": 2, "three": 3, "four": 4}
RELATIONS: dict[str, tuple[int, int]] = {
    # Direction from the second object to the first, (x, y), y pointing down.
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
TASKS = ("single", "color", "counting", "two", "binding", "position")
HELD_OUT_SCENES = {"single": 2, "color": 16, "counting": 64, "two": 50, "binding": 200, "position": 80}
"""How many scenes of each task are never used for training; with their forms, 512 captions in all."""
TRAIN_SCENES = {"single": 2, "color": 8, "counting": 20, "two": 22, "binding": 96, "position": 48}
"""How many scenes of each task make the training prompts; the others are left to pretraining alone."""

# Area of a shape of radius r is AREA[shape] * r^2; its centroid lies CENTROID_Y[shape] * r below its centre.
AREA = {"circle": math.pi, "square": 3.24, "triangle": 1.8, "cross": 2.3616}
CENTROID_Y = {"circle": 0.0, "square": 0.0, "triangle": 0.25, "cross": 0.0}

# Radii at 32 px by number of objects; other sizes scale linearly.
_RADII = {1: (6.5, 7.5, 8.5), 2: (5.5, 6.0, 6.5), 3: (4.4, 4.8), 4: (3.8, 4.2)}
# Centres lie on this raster (at 32 px): fewer subpixel cases to learn for a tiny model.
_RASTER = 2
_REFERENCE_SIZE = 32
_GAP = 1.5
# How far a shape's corners reach, in radii; a triangle's base corners are looked at one by one.
_REACH = {"circle": 1.0, "square": 1.28, "triangle": 1.0, "cross": 1.07}
# Objects are placed further along the axis of their relation than across it by the first factor; the second suffices.
_AXIS_RATIO, _HOLDS_RATIO = 1.2, 1.1


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """One asked-for object; `color` None means that any colour will do."""

    shape: str
    color: str | None = None

    def describe(self, article: str = "a") -> str:
        """Words such as "a red circle"."""
        return " ".join(word for word in (article, self.color, self.shape) if word)


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a caption: exactly these objects and, for `position`, the first related to the second."""

    task: str
    objects: tuple[ObjectSpec, ...]
    relation: str | None = None

    @property
    def forms(self) -> tuple[str, ...]:
        """Every caption of the scene, the plain one first: numerals too, and single objects without an article."""
        first = self.objects[0]
        if self.task == "counting":
            plural = ObjectSpec("crosses" if first.shape == "cross" else first.shape + "s", first.color)
            word = next(word for word, count in NUMBERS.items() if count == len(self.objects))
            return tuple(plural.describe(number) for number in (word, str(len(self.objects))))
        if len(self.objects) == 1:
            return tuple(first.describe(article) for article in ("a", "1", ""))
        return (f" {self.relation or 'and'} ".join(o.describe() for o in self.objects),)

    @property
    def caption(self) -> str:
        """The plain caption."""
        return self.forms[0]


@dataclass(frozen=True, slots=True)
class Placed:
    """An object on the canvas: centre (x, y) and radius in pixels."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


@cache
def scenes() -> dict[str, tuple[Scene, ...]]:
    """Every scene of the world by task, in a fixed order (2584 in all)."""
    plain = [ObjectSpec(s) for s in SHAPES]
    colored = [ObjectSpec(s, c) for s in SHAPES for c in COLORS]
    alike = [(a, b) for a, b in itertools.product(colored, repeat=2) if a.color == b.color and a.shape != b.shape]
    bound = [(a, b) for a, b in itertools.product(colored, repeat=2) if a.color != b.color]
    return {
        "single": tuple(Scene("single", (o,)) for o in plain),
        "color": tuple(Scene("color", (o,)) for o in colored),
        "counting": tuple(Scene("counting", (o,) * n) for n in NUMBERS.values() for o in plain + colored),
        "two": tuple(Scene("two", p) for p in alike),
        "binding": tuple(Scene("binding", p) for p in bound),
        "position": tuple(Scene("position", p, r) for p in bound for r in RELATIONS),
    }


@cache
def _by_caption() -> dict[str, Scene]:
    return {form: scene for group in scenes().values() for scene in group for form in scene.forms}


def parse(caption: str) -> Scene:
    """The scene that a caption asks for.

    Raises ValueError: the caption is not one of this world's.

    >>> parse("a red circle left of a blue square").relation
    'left of'
    """
    key = " ".join(caption.lower().split())
    try:
        return _by_caption()[key]
    except KeyError:
        raise ValueError(
            f"caption {caption!r} is not of the shapes world; it looks like 'a red circle', 'three squares', "
            f"'a red circle and a blue cross' or 'a red triangle above a green square'"
        ) from None


@cache
def split(part: str) -> tuple[Scene, ...]:
    """The scenes of `part`, "train" or "heldout"; the two share no caption.

    Within a task the order is that of a hash of the caption, so it never depends on this file's order.
    """
    if part not in ("train", "heldout"):
        raise ValueError(f"part={part!r}; use 'train' or 'heldout'")
    chosen: list[Scene] = []
    for task, group in scenes().items():
        ordered = sorted(group, key=lambda s: zlib.crc32(s.caption.encode()))
        held_out, train = HELD_OUT_SCENES[task], TRAIN_SCENES[task]
        chosen += ordered[:held_out] if part == "heldout" else ordered[held_out : held_out + train]
    return tuple(sorted(chosen, key=lambda s: zlib.crc32(s.caption[::-1].encode())))


def prompts(part: str) -> list[str]:
    """Captions of `split(part)`; `assets/prompts/shapes-*.txt` holds the same lines."""
    return [form for scene in split(part) for form in scene.forms]


def distance(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float | np.ndarray) -> np.ndarray:
    """Signed distance in pixels from the rim of a shape, negative inside, at offsets (dx, dy) from its centre.

    Several radii broadcast against the offsets. Outside, near a corner, it is a lower bound.
    """
    if shape == "circle":
        return np.hypot(dx, dy) - radius
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - 0.9 * radius
    if shape == "triangle":
        # Apex 0.95 r above the centre, base 0.85 r below it, half base r.
        slope = math.hypot(1.8, 1.0)
        side = (1.8 * np.abs(dx) - (dy + 0.95 * radius)) / slope
        return np.maximum(side, dy - 0.85 * radius)
    if shape == "cross":
        a, b = np.abs(dx), np.abs(dy)
        return np.minimum(np.maximum(a - radius, b - 0.36 * radius), np.maximum(a - 0.36 * radius, b - radius))
    raise ValueError(f"shape={shape!r}; use one of {', '.join(SHAPES)}")


def coverage(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float | np.ndarray) -> np.ndarray:
    """Antialiased coverage in [0, 1] of a shape at offsets (dx, dy) px from its centre."""
    return np.clip(0.5 - distance(shape, dx, dy, radius), 0.0, 1.0)


def holds(relation: str, first: tuple[float, float], second: tuple[float, float]) -> bool:
    """True where `first` stands in `relation` to `second`: on the right side, and clearly along that axis.

    On a diagonal, or within about 3 degrees of it, no relation holds.
    """
    (ux, uy) = RELATIONS[relation]
    dx, dy = first[0] - second[0], first[1] - second[1]
    along = ux * dx + uy * dy
    across = abs(uy * dx) + abs(ux * dy)
    return along > 0 and along >= _HOLDS_RATIO * across


def place(scene: Scene, rng: np.random.Generator, size: int = _REFERENCE_SIZE) -> tuple[Placed, ...]:
    """Draw positions, radii and unspecified colours for a scene, by rejection, without overlap.

    Objects to be counted share one colour here, but nothing asks for that: an image of "three squares" in
    three colours shows three squares, and the verifier accepts it.
    """
    scale = size / _REFERENCE_SIZE
    radii, raster = _RADII[len(scene.objects)], _RASTER * scale
    shared_color = COLORS[rng.integers(len(COLORS))] if scene.task == "counting" else None
    while True:
        placed: list[Placed] = []
        for spec in scene.objects:
            radius = radii[rng.integers(len(radii))] * scale
            first, last = math.ceil((radius + 0.5) / raster), math.floor((size - 1.5 * scale - radius) / raster)
            x, y = rng.integers(first, last + 1, 2) * raster
            color = spec.color or shared_color or COLORS[rng.integers(len(COLORS))]
            placed.append(Placed(spec.shape, color, float(x), float(y), float(radius)))
        if apart(placed, scale) and _related(placed, scene.relation):
            return tuple(placed)


def apart(placed: Sequence[Placed], scale: float) -> bool:
    """True where no two objects come near each other; `scale` is the image's size over 32 px."""
    for a, b in itertools.combinations(placed, 2):
        reach = sum(_REACH[p.shape] * p.radius for p in (a, b))
        if math.hypot(a.x - b.x, a.y - b.y) < reach + _GAP * scale:
            return False
        if min(_corner_gap(a, b), _corner_gap(b, a)) < _GAP * scale:
            return False
    return True


def _related(placed: Sequence[Placed], relation: str | None) -> bool:
    """True where the first of two objects stands well in the relation to the second; None: no relation."""
    if relation is None:
        return True
    (ux, uy), (a, b) = RELATIONS[relation], placed
    along = ux * (a.x - b.x) + uy * (a.y - b.y)
    across = abs(uy * (a.x - b.x)) + abs(ux * (a.y - b.y))
    return along > 0 and along >= _AXIS_RATIO * across


def _corner_gap(a: Placed, b: Placed) -> float:
    """Pixels between the base corners of a triangle `a`, 1.31 radii from its centre, and the rim of `b`."""
    if a.shape != "triangle":
        return math.inf
    x = np.asarray([a.x - a.radius, a.x + a.radius])
    y = np.full(2, a.y + 0.85 * a.radius)
    return float(distance(b.shape, x - b.x, y - b.y, b.radius).min())


def render(placed: Sequence[Placed], size: int = _REFERENCE_SIZE) -> np.ndarray:
    """Image of the placed objects, float32 [3, size, size] in [0, 1]."""
    yy, xx = np.mgrid[0:size, 0:size].astype(np.float32)
    image = np.full((3, size, size), BACKGROUND, dtype=np.float32)
    for item in placed:
        alpha = coverage(item.shape, xx - item.x, yy - item.y, item.radius)[None]
        color = np.asarray(PALETTE[item.color], dtype=np.float32)[:, None, None]
        image = image * (1 - alpha) + color * alpha
    return image.astype(np.float32)


def draw(scene: Scene, rng: np.random.Generator, size: int = _REFERENCE_SIZE) -> np.ndarray:
    """A random image of a scene, float32 [3, size, size] in [0, 1]."""
    return render(place(scene, rng, size), size)
