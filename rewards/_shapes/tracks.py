"""Objects of a video through time: those of every frame, linked by assignment. A helper, not a reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from flowrl.rewards._shapes.eye import BLOB, Found, detect_all
from scipy.optimize import linear_sum_assignment

from flowrl.shapes import COLORS, SHAPES

_OTHER = 6.0
"""What another shape, or another colour, counts in a link: as much as a distance of so many cells."""
_FAINT, _FAINT_SHARE = 1.5, 1 / 3
"""A leftover so many times over its bound is none, if so few frames have one: compression leaves them here and there
(WebP of quality 90 at 32 px), while junk is more or lasts."""


@dataclass(slots=True)
class Track:
    """One object over F frames: index of its shape and colour, -1 where it is not seen or has no palette colour.

    Centre and radius are in cells, of which a square video has 32 x 32; NaN where it is not seen.
    """

    frames: int
    shape: np.ndarray = field(init=False)
    color: np.ndarray = field(init=False)
    geometry: np.ndarray = field(init=False)
    """[F, 3]: x, y, radius."""
    last: Found | None = None

    def __post_init__(self) -> None:
        self.shape, self.color = (np.full(self.frames, -1) for _ in range(2))
        self.geometry = np.full((self.frames, 3), math.nan)

    def put(self, frame: int, found: Found, cell: float) -> None:
        """Goes on with an object of a frame; a cell is so many pixels."""
        self.shape[frame] = SHAPES.index(found.shape)
        self.color[frame] = -1 if found.color is None else COLORS.index(found.color)
        self.geometry[frame] = found.x / cell, found.y / cell, found.radius / cell
        self.last = found

    @property
    def seen(self) -> np.ndarray:
        """Frames in which it is, [F] bool."""
        return self.shape >= 0


def cell_of(video: np.ndarray) -> float:
    """Pixels of a cell of a video [F, 3, H, W]."""
    return math.sqrt(video.shape[-2] * video.shape[-1]) / 32


def tracked(video: np.ndarray) -> tuple[list[Track], np.ndarray]:
    """Tracks of a video's shapes, float [F, 3, H, W], and how many objects of any kind each frame has, [F].

    What has no shape is counted and in no track.
    """
    found, cell = detect_all(video), cell_of(video)
    tracks: list[Track] = []
    for frame, objects in enumerate(found):
        known = [each for each in objects if each.shape != BLOB]
        if not known:
            continue
        links = _links(tracks, known, cell)
        for number, each in enumerate(known):
            if number not in links:
                tracks.append(Track(len(video)))
            links.get(number, tracks[-1]).put(frame, each, cell)
    return tracks, _counts(found)


def _counts(found: Sequence[Sequence[Found]]) -> np.ndarray:
    """Objects of every frame, [F], without faint leftovers of a few frames."""
    solid = np.asarray([sum(each.excess > _FAINT for each in objects) for objects in found])
    faint = np.asarray([len(objects) for objects in found]) - solid
    return solid if np.count_nonzero(faint) <= _FAINT_SHARE * len(found) else solid + faint


def _links(tracks: Sequence[Track], found: Sequence[Found], cell: float) -> dict[int, Track]:
    """Track of every object that goes on with one, by the object's number."""
    if len(tracks) == len(found) == 1:
        return {0: tracks[0]}
    ends = [track.last for track in tracks]
    cost = np.asarray([[_cost(a, b, cell) if a else 0.0 for b in found] for a in ends]).reshape(len(ends), len(found))
    rows, columns = linear_sum_assignment(cost)
    return {int(column): tracks[row] for row, column in zip(rows, columns, strict=True)}


def _cost(before: Found, after: Found, cell: float) -> float:
    """How unlike two objects are, in cells."""
    apart = math.hypot(before.x - after.x, before.y - after.y) / cell
    return apart + _OTHER * ((before.shape != after.shape) + (before.color != after.color))
