"""Verifier of edits of the shapes world: is what the instruction asks for there, and all else as it was?

Source (metadata["images"], one path) and result are seen as the verifier of images sees them (`_shapes/eye.py`).
Objects that the instruction does not touch are matched first: shape and colour, place within 2.5 cells, size; a
square image has 32 x 32 cells. What is left of the result is judged against the instruction.

    edit_strict     1 where the edit follows and keeps, else 0
    edit_follows    1 where what the instruction asks for is there, and nothing of what it replaces
    edit_keeps      1 where every untouched object is as it was, and nothing else appears
    edit_partial    mean of both in degrees; 1 where strict is
    edit_unchanged  1 where the result shows the source's objects as they were, and nothing else; less is better

Source: this project; `python -m tests.rewards.test_shapes_edit` measures it (docs/rewards/shapes_edit.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flowrl.rewards._shapes.eye import BLOB, Found, detect, detect_all
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flowrl.edited_shapes import Edit, parse
from flowrl.media.media import UNREADABLE, open_image, pixels
from flowrl.moving_shapes import DIRECTIONS
from flowrl.reward import Card, Images, Reward, RewardError
from flowrl.shapes import ObjectSpec, holds

LEVEL = "tested"
CARD = Card(
    outputs=("edit_strict", "edit_partial", "edit_follows", "edit_keeps", "edit_unchanged"),
    low=0.0,
    high=1.0,
    less_is_better=("edit_unchanged",),
    modality="edit",
    resolution="every pixel, averaged to 32 x 32 cells; what is finer counts as energy",
    requires=("images",),
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="flowrl lab",
)
_SIDE = 32
_PLACE = 2.5
"""How far an object may be off its place, in cells."""
_SIZE = 1.25
"""Larger over smaller radius from which a size is another one; rendered objects grow by 1.5."""
_TRAVEL = 4.0
"""Least way of an object that moves; rendered ones move by 8."""


@dataclass(frozen=True, kw_only=True)
class Config:
    surplus_penalty: float = 0.25
    """Loss of the partial score, in its part of what is kept, for each object too many; two at most count."""

    def __post_init__(self) -> None:
        if not self.surplus_penalty >= 0:
            raise ValueError(f"surplus_penalty={self.surplus_penalty} must be at least 0")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one result; `partial` in [0, 1]."""

    follows: bool
    keeps: bool
    unchanged: bool
    partial: float

    @property
    def row(self) -> tuple[float, ...]:
        """In the order of the card."""
        strict = self.follows and self.keeps
        return float(strict), 1.0 if strict else self.partial, *map(float, (self.follows, self.keeps, self.unchanged))


Goal = Callable[[Found], tuple[bool, tuple[bool, ...]]]
"""(whether an object shows the change, what else is asked of it)."""


def _apart(a: Found, b: Found) -> float:
    return math.hypot(a.x - b.x, a.y - b.y)


def _near(a: Found, b: Found) -> bool:
    return _apart(a, b) <= _PLACE


def _sized(a: Found, b: Found) -> bool:
    return max(a.radius, b.radius) < _SIZE * min(a.radius, b.radius)  # False for a leftover, whose radius is NaN


def _is(found: Found, spec: ObjectSpec) -> bool:
    return found.shape == spec.shape and found.color == spec.color


def _same(a: Found, b: Found) -> bool:
    return a.shape == b.shape and a.color == b.color and _near(a, b) and _sized(a, b)


def in_cells(found: Sequence[Found], height: int, width: int) -> list[Found]:
    """Objects of an image of so many pixels, in cells."""
    cell = math.sqrt(height * width) / _SIDE
    return [replace(f, x=(f.x + 0.5) / cell - 0.5, y=(f.y + 0.5) / cell - 0.5, radius=f.radius / cell) for f in found]


def named(edit: Edit, source: Sequence[Found]) -> list[Found]:
    """The source's objects that the instruction names.

    Raises:
        RewardError: one of them is not there, or there more than once.
    """
    chosen = []
    for spec in edit.named:
        fits = [found for found in source if _is(found, spec)]
        if len(fits) != 1:
            shown = ", ".join(ObjectSpec(f.shape, f.color).describe() for f in source) or "nothing"
            raise RewardError(
                f"reward 'shapes_edit': the instruction {edit.instruction!r} names {spec.describe('the')}, of which "
                f"the source shows {len(fits)}, not 1; it shows {shown}: give another source, or name one of these"
            )
        chosen += fits
    return chosen


def _goals(edit: Edit, old: Sequence[Found]) -> list[Goal]:
    """What must be found among the objects that are not kept; none where an object is removed."""
    first, value = old[0], edit.value or ""
    if edit.operation == "remove":
        return []
    if edit.operation == "add":
        wanted = edit.other
        assert wanted is not None
        place = (first.x, first.y)
        return [lambda f: (f.color == wanted.color and holds(value, (f.x, f.y), place), (f.shape == wanted.shape,))]
    if edit.operation == "swap":
        pairs = zip(old, reversed(old), strict=True)
        return [
            lambda f, mine=mine, goal=goal: (
                f.color == mine.color and _near(f, goal),
                (f.shape == mine.shape, _sized(f, mine)),
            )
            for mine, goal in pairs
        ]
    if edit.operation == "move":
        ux, uy = DIRECTIONS[value]

        def moved(f: Found) -> tuple[bool, tuple[bool, ...]]:
            dx, dy = f.x - first.x, f.y - first.y
            straight = abs(uy * dx) + abs(ux * dy) <= _PLACE
            far = ux * dx + uy * dy >= _TRAVEL
            return f.color == first.color and far, (straight, f.shape == first.shape, _sized(f, first))

        return [moved]
    if edit.operation == "size":
        power = 1 if value == "larger" else -1

        def sized(f: Found) -> tuple[bool, tuple[bool, ...]]:
            changed = _at(f, first) and (f.radius / first.radius) ** power >= _SIZE
            return changed, (_near(f, first), f.shape == first.shape, f.color == first.color)

        return [sized]
    key, other = ("color", "shape") if edit.operation == "recolor" else ("shape", "color")
    look = {"color": lambda f: f.color, "shape": lambda f: f.shape}
    return [
        lambda f: (
            _at(f, first) and look[key](f) == value,
            (_near(f, first), look[other](f) == look[other](first), _sized(f, first)),
        )
    ]


def _at(found: Found, old: Found) -> bool:
    """Whether something stands where the old object stood."""
    return _apart(found, old) <= old.radius + _PLACE


def _reached(goals: Sequence[Goal], left: Sequence[Found]) -> tuple[float, list[Found]]:
    """(mean degree of the goals under the best choice of objects, the objects that no goal has)."""
    best, rest = 0.0, list(left)
    for chosen in itertools.permutations(left, min(len(goals), len(left))) if goals else ():
        told = [goal(found) for goal, found in zip(goals, chosen, strict=False)]
        degree = sum(changed * (1 + sum(others) / len(others)) / 2 for changed, others in told) / len(goals)
        if degree > best:
            best, rest = degree, [found for found in left if not any(found is one for one in chosen)]
    return best, rest


def judge(edit: Edit, source: Sequence[Found], result: Sequence[Found], penalty: float = 0.25) -> Verdict:
    """What a result is, its objects and the source's in cells.

    Raises:
        RewardError: the instruction does not name what is in the source.
    """
    old = named(edit, source)
    touched = [] if edit.operation == "add" else old
    kept = [found for found in source if not any(found is one for one in touched)]
    degrees, matched = _matched(kept, result)
    left = [found for number, found in enumerate(result) if number not in matched]
    degree, rest = _reached(_goals(edit, old), left)
    stands = any(_at(found, one) for found in rest for one in touched)
    if edit.operation == "remove":
        degree = float(not stands and not any(_is(found, edit.object) for found in left))
    # What keeps its place may be drawn badly there; else there is nothing but the objects themselves.
    free = {"add": 1, "move": 1, "swap": 2}.get(edit.operation)
    surplus = sum(not any(_at(f, one) for one in touched) for f in left) if free is None else max(len(left) - free, 0)
    keeps = len(matched) == len(kept) and surplus == 0
    held = max((sum(degrees) / len(kept) if kept else 1.0) - penalty * min(surplus, 2), 0.0)
    unchanged = len(result) == len(source) == len(_matched(source, result)[1])
    return Verdict(degree == 1.0 and not stands, keeps, unchanged, 0.5 * degree * (0.5 if stands else 1.0) + 0.5 * held)


def _matched(kept: Sequence[Found], result: Sequence[Found]) -> tuple[list[float], set[int]]:
    """(degrees of the kept objects, numbers of the result's objects that are one of them) by the best assignment.

    A degree is 1 for an object as it was; near its place 0.5 for its colour, or 0.25 for its shape.
    """
    if not kept or not result:
        return [0.0] * len(kept), set()
    table = np.asarray(
        [
            [
                1.0 if _same(f, o) else (0.5 * (f.color == o.color) or 0.25 * (f.shape == o.shape)) * _at(f, o)
                for f in result
            ]
            for o in kept
        ]
    )
    rows, columns = linear_sum_assignment(table, maximize=True)
    whole = {int(column) for row, column in zip(rows, columns, strict=True) if table[row, column] == 1.0}
    return table[rows, columns].tolist(), whole


def wanted_edit(prompt: str) -> Edit:
    """The edit that a prompt asks for.

    Raises:
        RewardError: it is no instruction of this world.
    """
    try:
        return parse(prompt)
    except ValueError as error:
        raise RewardError(f"reward 'shapes_edit': {error}") from None


def source_objects(metadata: Mapping[str, Any]) -> list[Found]:
    """The objects of the record's source, in cells.

    Raises:
        RewardError: there is not exactly one source, it cannot be read, or it shows what is no object of this world.
    """
    paths = metadata.get("images")
    if not isinstance(paths, Sequence) or isinstance(paths, str) or len(paths) != 1:
        raise RewardError(
            f"reward 'shapes_edit' needs the one image to edit in metadata[\"images\"], got {paths!r}; give its path "
            "under 'image' in a .jsonl prompt file"
        )
    try:
        image = pixels(open_image(paths[0])).numpy()
    except UNREADABLE as error:
        raise RewardError(f"reward 'shapes_edit' cannot read the source image {paths[0]!r}: {error}") from error
    found = in_cells(detect(image), *image.shape[-2:])
    if any(each.shape == BLOB or each.color is None for each in found):
        raise RewardError(
            f"reward 'shapes_edit': the source {paths[0]!r} shows something that is no shape of this world"
        )
    return found


def check_prompt(prompt: str, metadata: dict) -> None:
    """Raise RewardError for no instruction of this world, or one that its source does not fit, before all loading."""
    edit = wanted_edit(prompt)
    if "images" in metadata:
        named(edit, source_objects(metadata))


def build(config: Config) -> Reward:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        edits = [wanted_edit(prompt) for prompt in prompts]
        paths = [str(record.get("images")) for record in metadata]
        sources = {path: source_objects(record) for path, record in dict(zip(paths, metadata, strict=True)).items()}
        rows = [(math.nan,) * len(CARD.outputs)] * len(edits)
        results = [image.detach().float().cpu().numpy() for image in images]
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, image in enumerate(results):
            if np.isfinite(image).all():
                sizes.setdefault(image.shape, []).append(i)
        for shape, places in sizes.items():
            for i, found in zip(places, detect_all(np.stack([results[i] for i in places])), strict=True):
                shown = in_cells(found, *shape[-2:])
                rows[i] = judge(edits[i], sources[paths[i]], shown, config.surplus_penalty).row
        values = torch.tensor(rows, dtype=torch.float32).reshape(-1, len(CARD.outputs))
        return dict(zip(CARD.outputs, values.unbind(1), strict=True))

    return Reward(score, CARD)
