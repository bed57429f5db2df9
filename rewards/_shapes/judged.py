"""Asked-for objects of a video, judged on their tracks. A helper, not a reward.

Every condition is a number from 0 to 1, 1 where it holds; lengths are in cells, of which a square video has 32 x 32.
Rendered objects travel 8 cells and grow by 1.6; half of that and a little more is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flowrl.rewards._shapes.tracks import Track
from scipy.optimize import linear_sum_assignment

from flowrl.moving_shapes import DIRECTIONS, Actor, MovingScene, switches
from flowrl.shapes import COLORS, SHAPES

# Conditions hold at the first number and are 0 at the second.
_TRAVEL = (4.0, 0.5)
"""Distance along the asked direction."""
_ACROSS, _STILL = (1.5, 5.0), (1.5, 5.0)
"""Extent across it, and in any direction for what does not move."""
_STEADY_RADIUS = (1.25, 1.6)
"""Largest over smallest radius of what keeps its size."""
_GROWTH = (1.28, 1.08)
"""Last over first radius of what grows, or the reverse; areas have the square of it."""
# A step may differ from the mean one by half as much again, and by the second number for noise.
_STEP, _STEP_NOISE, _STEP_RATIO_NOISE = 1.5, 0.75, 0.12
_LINE, _LINE_NOISE = 0.12, 2 / 3
"""Distance from constant speed: this share of the whole way, and of a step's noise."""
_SLACK = 1.0
"""A bound is left by this much of itself where its condition is 0."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An asked-for object with the track that fits it best."""

    actor: Actor
    looks: float = 0.0
    """Mean over frames: 1 for shape and colour, 0.5 for the colour on another shape, 0.25 for the shape alone."""
    motion: float = 0.0
    """Product of the conditions of its motion; for what stays, of its stillness."""
    switch: int = 0
    """First frame of the new colour, for an object that turns; else 0."""
    course: np.ndarray | None = None
    """[F, 3]: x, y, radius of the asked course nearest to the track, in cells; None: no track fits at all."""


def judge(scene: MovingScene, tracks: Sequence[Track], frames: int) -> list[Judged]:
    """Every actor of the scene with its own track, by the best assignment."""
    table = [[_on(actor, track) for track in tracks] for actor in scene.actors]
    result = [Judged(actor) for actor in scene.actors]
    if tracks:
        worth = np.asarray([[each.looks * (1 + each.motion) for each in row] for row in table])
        for row, column in zip(*linear_sum_assignment(worth, maximize=True), strict=True):
            if table[row][column].looks > 0:
                result[row] = table[row][column]
    return result


def _on(actor: Actor, track: Track) -> Judged:
    """An actor judged on one track."""
    looks, switch, turned = _appearance(actor, track)
    if not looks:
        return Judged(actor)
    at = np.flatnonzero(track.seen)
    if len(at) < 2:
        return Judged(actor, looks, 0.0, switch, np.repeat(track.geometry[at], track.frames, axis=0))
    time, geometry = at / (track.frames - 1), track.geometry[at]
    motion = turned * (_travels(actor, time, geometry) if actor.direction else _keeps_place(geometry))
    motion *= _grows(actor, time, geometry) if actor.growth else at_most(_ratio(geometry[:, 2]), *_STEADY_RADIUS)
    return Judged(actor, looks, motion, switch, _course(actor, time, geometry, track.frames))


def _appearance(actor: Actor, track: Track) -> tuple[float, int, float]:
    """(looks, first frame of the new colour, condition of the change of colour, which is 1 where none is asked)."""
    shaped, seen = track.shape == SHAPES.index(actor.object.shape), track.seen
    if actor.turned is None:
        if actor.object.color is not None:
            wanted = COLORS.index(actor.object.color)
        else:
            named = track.color[shaped & (track.color >= 0)]
            if not len(named):
                return 0.25 * float(shaped.mean()), 0, 1.0
            # Whatever colour it has, it keeps; on another shape no colour is paid.
            wanted = int(np.bincount(named).argmax())
            seen = shaped
        return _score(shaped, seen & (track.color == wanted)), 0, 1.0
    old, new = (seen & (track.color == COLORS.index(color)) for color in (actor.object.color, actor.turned))
    order = np.arange(track.frames)
    middle = switches(track.frames)
    scores = [_score(shaped, np.where(order < switch, old, new)) for switch in middle]
    best = int(np.argmax(scores))
    before, after = old[: middle[0]].mean(), new[middle[-1] :].mean()
    return scores[best], middle[best], float(before * after)


def _score(shaped: np.ndarray, colored: np.ndarray) -> float:
    return float(np.where(shaped & colored, 1.0, np.where(colored, 0.5, np.where(shaped, 0.25, 0.0))).mean())


def _travels(actor: Actor, time: np.ndarray, geometry: np.ndarray) -> float:
    """Conditions of a motion in the asked direction: distance, straightness, even steps, constant speed."""
    ux, uy = DIRECTIONS[actor.direction or "right"]
    along = geometry[:, :2] @ (ux, uy)
    across = geometry[:, :2] @ (uy, ux)
    way = _slope(time, along)
    return (
        _at_least(min(way, along[-1] - along[0]), *_TRAVEL)
        * at_most(float(np.ptp(across)), *_ACROSS)
        * _even(time, along, max(way, 0.0), _STEP_NOISE)
    )


def _grows(actor: Actor, time: np.ndarray, geometry: np.ndarray) -> float:
    """Conditions of a size that changes as asked: by how much, and in even steps."""
    logs = actor.growth * np.log(geometry[:, 2])
    way = _slope(time, logs)
    enough = _at_least(math.exp(min(way, logs[-1] - logs[0])), *_GROWTH)
    return enough * _even(time, logs, max(way, 0.0), _STEP_RATIO_NOISE)


def _even(time: np.ndarray, values: np.ndarray, way: float, noise: float) -> float:
    """Condition that values change at constant speed, without jumps; `way` is their whole change."""
    steps = np.diff(time)
    jump = float(np.abs(np.diff(values) - way * steps).max())
    line = values - values.mean() - way * (time - time.mean())
    bounds = (_STEP * way * float(steps.max()) + noise, _LINE * way + _LINE_NOISE * noise)
    return math.prod(
        at_most(value, bound, (1 + _SLACK) * bound)
        for value, bound in zip((jump, float(np.abs(line).max())), bounds, strict=True)
    )


def _keeps_place(geometry: np.ndarray) -> float:
    """Condition that a centre keeps its place."""
    return at_most(math.hypot(*np.ptp(geometry[:, :2], axis=0)), *_STILL)


def _course(actor: Actor, time: np.ndarray, geometry: np.ndarray, frames: int) -> np.ndarray:
    """[F, 3] of the asked course nearest to the track."""
    moment = np.linspace(0.0, 1.0, frames)[:, None] - time.mean()
    change = np.zeros(3)
    if actor.direction:
        way = np.asarray(DIRECTIONS[actor.direction], dtype=float)
        change[:2] = way * max(_slope(time, geometry[:, :2] @ way), 0.0)
    if actor.growth:
        change[2] = actor.growth * max(actor.growth * _slope(time, geometry[:, 2]), 0.0)
    return np.maximum(geometry.mean(axis=0) + moment * change, (-np.inf, -np.inf, 0.1))


def _slope(time: np.ndarray, values: np.ndarray) -> float:
    """Change of values over the whole video, by least squares."""
    centred = time - time.mean()
    return float(centred @ values / (centred @ centred))


def _ratio(radius: np.ndarray) -> float:
    return float(radius.max() / radius.min())


def _at_least(value: float, good: float, bad: float) -> float:
    return min(max((value - bad) / (good - bad), 0.0), 1.0)


def at_most(value: float, good: float, bad: float) -> float:
    return min(max((bad - value) / (bad - good), 0.0), 1.0)
