"""Edits of the shapes world: a scene, an instruction about one of its objects, and the scene that it leads to.

No two objects of a scene have one colour. What an instruction does not name stays as it was, and every edit has one
result, which stands apart as scenes do. `rewards/shapes_edit.py` judges. Lengths are in pixels of the image.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl import shapes
from flowrl.moving_shapes import DIRECTIONS
from flowrl.shapes import COLORS, RELATIONS, SHAPES, ObjectSpec, Placed

TEMPLATES = {
    "recolor": "make the {object} {value}",
    "remove": "remove the {object}",
    "add": "add a {other} {value} the {object}",
    "reshape": "turn the {object} into a {value}",
    "move": "move the {object} {value}",
    "swap": "swap the {object} and the {other}",
    "size": "make the {object} {value}",
}
OPERATIONS = tuple(TEMPLATES)
VALUES = {
    **{"recolor": COLORS, "reshape": SHAPES, "size": ("larger", "smaller")},
    **{"add": tuple(RELATIONS), "move": tuple(DIRECTIONS)},
}
TRAVEL, GROWTH = 8.0, 1.5
"""How far an object moves, in pixels at 32 px, and the larger over the smaller radius."""
_SIDE, _RASTER, _RADII = 32, 2, (4.4, 5.0)
_BESIDE = (10.0, 12.0, 14.0, 16.0)
"""Distances at which an added object may stand: the first that leaves room."""


def _pattern(operation: str) -> re.Pattern[str]:
    name, values = rf"(?:{'|'.join(COLORS)}) (?:{'|'.join(SHAPES)})", "|".join(VALUES.get(operation, ()))
    parts = {"object": name, "other": name, "value": values}
    return re.compile(TEMPLATES[operation].format(**{key: f"(?P<{key}>{part})" for key, part in parts.items()}))


_PATTERNS = {operation: _pattern(operation) for operation in OPERATIONS}


@dataclass(frozen=True, slots=True)
class Edit:
    """What an instruction asks for."""

    operation: str
    object: ObjectSpec
    """The named object of the source; for `add`, the one beside the new one."""
    value: str | None = None
    """New colour, shape or size, the direction of a move, or how the new object stands to the named one."""
    other: ObjectSpec | None = None
    """The object to add, or to swap with."""

    @property
    def instruction(self) -> str:
        """The words, as `parse` reads them."""
        other = self.other and self.other.describe("")
        return TEMPLATES[self.operation].format(object=self.object.describe(""), value=self.value, other=other)

    @property
    def named(self) -> tuple[ObjectSpec, ...]:
        """What must be in the source."""
        return (self.object, self.other) if self.operation == "swap" and self.other else (self.object,)


@dataclass(frozen=True, slots=True)
class Pair:
    """An edit with its source and its result."""

    edit: Edit
    source: tuple[Placed, ...]
    result: tuple[Placed, ...]

    @property
    def content(self) -> str:
        """Instruction and source objects, wherever they stand."""
        return ", ".join([self.edit.instruction, *sorted(f"{p.color} {p.shape}" for p in self.source)])

    @property
    def part(self) -> str:
        """ "heldout", "train" or "pretrain", by a hash of the content: no two parts share one."""
        return {0: "heldout", 1: "train"}.get(zlib.crc32(self.content.encode()) % 10, "pretrain")


def parse(instruction: str) -> Edit:
    """The edit that an instruction asks for.

    Raises ValueError: the instruction is not one of this world's.

    >>> parse("add a red circle left of the blue square").value
    'left of'
    """
    for operation, pattern in _PATTERNS.items():
        if read := pattern.fullmatch(" ".join(instruction.lower().split())):
            words = read.groupdict()
            names = {k: ObjectSpec(*words[k].split()[::-1]) for k in ("object", "other") if k in words}
            first, other, value = names["object"], names.get("other"), words.get("value")
            if first != other and value not in (first.color, first.shape):
                return Edit(operation, first, value, other)
    raise ValueError(
        f"instruction {instruction!r} is no edit of the shapes world; it looks like 'make the red circle blue', "
        "'remove the red circle', 'add a green cross left of the red circle', 'turn the red circle into a square', "
        "'move the red circle up', 'swap the red circle and the blue square' or 'make the red circle larger'"
    )


def apply(edit: Edit, source: Sequence[Placed], scale: float = 1.0) -> tuple[Placed, ...] | None:
    """The result of an edit of a source that has its named objects; `scale` is the image's size over 32 px.

    None: it leaves the image, or comes near another object.
    """
    items = {ObjectSpec(p.shape, p.color): p for p in source}
    old, value = items[edit.object], edit.value or ""
    if edit.operation == "add" and edit.other:
        (ux, uy), new = RELATIONS[value], Placed(edit.other.shape, edit.other.color or "", 0, 0, _RADII[-1] * scale)
        ways = ((*source, replace(new, x=old.x + ux * d * scale, y=old.y + uy * d * scale)) for d in _BESIDE)
        return next((way for way in ways if _stands(way, scale)), None)
    if edit.operation == "swap":
        other = items[edit.named[1]]
        items |= {edit.named[1]: replace(other, x=old.x, y=old.y), edit.object: replace(old, x=other.x, y=other.y)}
    elif edit.operation == "remove":
        del items[edit.object]
    elif edit.operation == "move":
        dx, dy = (TRAVEL * scale * step for step in DIRECTIONS[value])
        items[edit.object] = replace(old, x=old.x + dx, y=old.y + dy)
    elif edit.operation == "size":
        items[edit.object] = replace(old, radius=old.radius * (GROWTH if value == "larger" else 1 / GROWTH))
    else:
        items[edit.object] = replace(old, **{"color" if edit.operation == "recolor" else "shape": value})
    result = tuple(items.values())
    return result if _stands(result, scale) else None


def _stands(placed: Sequence[Placed], scale: float) -> bool:
    """Whether the objects are within the image and apart."""
    return shapes.apart(placed, scale) and all(
        p.radius + 0.5 * scale <= min(p.x, p.y) and max(p.x, p.y) <= (_SIDE - 1.5) * scale - p.radius for p in placed
    )


def draw(operation: str, rng: np.random.Generator, size: int = _SIDE, part: str | None = None) -> Pair:
    """A random pair, by rejection; its source has two objects, or three where nothing is added. `part` None: of any."""
    scale = size / _SIDE
    while True:
        count = 2 + int(operation != "add" and rng.random() < 0.4)
        colors = rng.permutation(COLORS).tolist()
        names = [ObjectSpec(SHAPES[rng.integers(len(SHAPES))], color) for color in colors[: count + 1]]
        first, second, *_, new = names  # the last is not in the source
        values = [v for v in VALUES.get(operation, ()) if v != first.shape] if operation != "recolor" else [new.color]
        value = values[rng.integers(len(values))] if values else None
        edit = Edit(operation, first, value, {"add": new, "swap": second}.get(operation))
        radii = [_RADII[rng.integers(len(_RADII))] for _ in range(count)]
        if operation == "size":
            radii[0] = _RADII[0] * (1 if value == "larger" else GROWTH)
        places = rng.integers(2, _SIDE // _RASTER - 1, (count, 2)) * float(_RASTER * scale)
        source = [
            Placed(name.shape, color, float(x), float(y), radius * scale)
            for name, color, (x, y), radius in zip(names, colors, places, radii, strict=False)
        ]
        if _stands(source, scale) and (result := apply(edit, source, scale)) is not None:
            # In an order of their own: the first object is not always the one that changes.
            sides = (tuple(sorted(side, key=lambda p: p.color)) for side in (source, result))
            pair = Pair(edit, *sides)
            if part in (None, pair.part):
                return pair
