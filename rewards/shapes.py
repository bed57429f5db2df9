"""Verifier of the shapes world: does an image show exactly what its caption asks for?

A piece is a connected region of one palette hue. It is recognised by synthesis: its antialiased
coverage gives area and centroid, every shape of that area is rendered at that place, and the best
soft overlap names it. What no hue claims and is solid (grey, white, hues in between) counts as an
object too, so that nothing drawn beside the asked-for objects goes unseen.

Source: this project; `python tests/rewards/test_rewards_shapes.py` prints the accuracy behind the thresholds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flowrl.reward import Card, Images, Reward, RewardError
from flowrl.shapes import AREA, BACKGROUND, CENTROID_Y, COLORS, PALETTE, SHAPES, ObjectSpec, Scene, holds, parse
from flowrl.shapes import coverage as shape_coverage

BLOB = "blob"
_OFFSETS = np.asarray([PALETTE[c] for c in COLORS], dtype=np.float32) - np.float32(BACKGROUND)
_LENGTHS = np.linalg.norm(_OFFSETS, axis=1)
_UNNAMED = len(COLORS)
_FOREGROUND = 0.34
# Neighbouring hues are 35 to 45 degrees apart. A pixel may be 26 off, so that noise does not tear a shape;
# a whole piece, whose noise averages out, may be 13 off, which leaves every hue halfway between unnamed.
_MIN_PIXEL_COSINE = 0.90
_MIN_PIECE_COSINE = 0.974
# At 32 px and noise of std 0.08, shapes overlap with their template by 0.85 or more; two of them grown together,
# even without noise, by 0.82 or less.
_MIN_OVERLAP = 0.83
# At 32 px, in pixels: smaller pieces are specks; pieces below the second number are too small to be an object.
_SPECK_PX, _OBJECT_PX = 8, 16
_SOLID_PX = 2
"""Pixels that an unnamed piece must keep without its rim in order to count."""
_BLOCK = np.ones((3, 3), dtype=bool)

LEVEL = "tested"
CARD = Card(
    outputs=("shapes_strict", "shapes_partial"),
    low=0.0,
    high=1.0,
    modality="image",
    resolution="every pixel; thresholds scale with the area, 32 px being the reference",
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="flowrl lab",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    surplus_penalty: float = 0.25
    """Loss of the partial score for each surplus object; two at most count."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised object: shape ("blob" if none fits), colour (None if no palette hue), centre in pixels."""

    shape: str
    color: str | None
    x: float
    y: float


def detect(image: np.ndarray) -> list[Found]:
    """Objects of an image, float [3, H, W] in [0, 1]; unrecognisable pieces come back as blobs."""
    offset = image.astype(np.float32) - np.float32(BACKGROUND)
    foreground = offset.max(axis=0) > _FOREGROUND
    if not foreground.any():
        return []
    dots = np.tensordot(_OFFSETS, offset, axes=1)  # [colors, H, W]
    cosine = dots / (_LENGTHS[:, None, None] * np.maximum(np.sqrt((offset**2).sum(axis=0)), 1e-6))
    nearest = np.where(cosine.max(axis=0) > _MIN_PIXEL_COSINE, cosine.argmax(axis=0), _UNNAMED)
    nearest[~foreground] = -1
    scale = image.shape[1] * image.shape[2] / 32**2
    result: list[Found] = []
    leftover = foreground
    for index in np.flatnonzero(np.bincount(nearest[foreground], minlength=_UNNAMED)[:_UNNAMED]):
        labels = _pieces(nearest == index)
        for component, tight in enumerate(ndimage.find_objects(labels), start=1):
            # One pixel more on every side holds the antialiased rim.
            box = tuple(slice(max(s.start - 1, 0), s.stop + 1) for s in tight)
            piece = labels[box] == component
            size = np.count_nonzero(piece)
            if size < _SPECK_PX * scale:
                continue
            leftover[box] &= ~piece
            mean = offset[:, *box][:, piece].sum(axis=1)
            named = float(_OFFSETS[index] @ mean) > _MIN_PIECE_COSINE * float(_LENGTHS[index] * np.linalg.norm(mean))
            color = COLORS[index] if named else None
            if color is None or size < _OBJECT_PX * scale:
                result.append(_blob(piece, color, box))
                continue
            own = ndimage.binary_dilation(piece, structure=_BLOCK) & ((nearest[box] == index) | (nearest[box] == -1))
            alpha = np.clip(dots[index][box] / _LENGTHS[index] ** 2, 0.0, 1.0)
            result.append(_recognise(alpha * own, color, box))
    return result + _unclaimed(leftover, scale)


def _pieces(mask: np.ndarray, structure: np.ndarray | None = None) -> np.ndarray:
    """Number of the connected piece that each pixel is in, 0 outside; [H, W] int32."""
    labels = np.zeros(mask.shape, dtype=np.int32)
    ndimage.label(mask, structure, output=labels)
    return labels


def _unclaimed(leftover: np.ndarray, scale: float) -> list[Found]:
    """Solid pieces of no palette hue. Noisy rims and the border of touching objects are thin, and do not count."""
    labels = _pieces(leftover, _BLOCK)
    result = []
    for component, box in enumerate(ndimage.find_objects(labels), start=1):
        piece = labels[box] == component
        if np.count_nonzero(piece) < _SPECK_PX * scale:
            continue
        if np.count_nonzero(ndimage.binary_erosion(piece)) >= _SOLID_PX * scale:
            result.append(_blob(piece, None, box))
    return result


def _blob(piece: np.ndarray, color: str | None, box: tuple[slice, ...]) -> Found:
    rows, columns = piece.nonzero()
    return Found(BLOB, color, float(columns.mean()) + box[1].start, float(rows.mean()) + box[0].start)


def _recognise(alpha: np.ndarray, color: str, box: tuple[slice, ...]) -> Found:
    """The shape whose rendering overlaps the piece best; `alpha` is the piece's coverage inside `box`."""
    rows = np.arange(alpha.shape[0], dtype=np.float32)[:, None]
    columns = np.arange(alpha.shape[1], dtype=np.float32)[None, :]
    area = float(alpha.sum())
    x, y = float((alpha * columns).sum()) / area, float((alpha * rows).sum()) / area
    best, name, center_y = _MIN_OVERLAP, BLOB, y
    for shape in SHAPES:
        radius = float(np.sqrt(area / AREA[shape]))
        top = y - CENTROID_Y[shape] * radius
        template = shape_coverage(shape, columns - x, rows - top, radius)
        # The template has the piece's area by construction, also where it leaves the box.
        shared = float(np.minimum(alpha, template).sum())
        overlap = shared / (2 * area - shared)
        if overlap > best:
            best, name, center_y = overlap, shape, top
    return Found(name, color, x + box[1].start, center_y + box[0].start)


def _object_score(spec: ObjectSpec, found: Found) -> float:
    """1 for the right shape in the right colour, 0.5 for colour only, 0.25 for shape only."""
    shape = found.shape == spec.shape
    if spec.color is None:
        return 1.0 if shape else 0.0
    color = found.color == spec.color
    return 1.0 if shape and color else 0.5 if color else 0.25 if shape else 0.0


def score_scene(scene: Scene, found: Sequence[Found], surplus_penalty: float = 0.25) -> tuple[float, float]:
    """(strict, partial) of the found objects against the scene.

    strict is 1 where the multiset of objects and the relation are exactly the asked ones, else 0.
    partial in [0, 1] is the mean object score under the best assignment, less the surplus penalty;
    for `position` 0.6 of that and 0.4 for the relation between the two assigned objects.
    """
    wanted = len(scene.objects)
    if not found:
        return 0.0, 0.0
    table = np.asarray([[_object_score(spec, item) for item in found] for spec in scene.objects])
    related = True
    if scene.relation is None:
        total = float(table[linear_sum_assignment(table, maximize=True)].sum()) / wanted
    else:
        total, related = _best_pair(scene.relation, table, found)
    surplus = len(found) - wanted
    strict = float(total == 1.0 and related and surplus == 0)
    objects = max(total - surplus_penalty * min(max(surplus, 0), 2), 0.0)
    if scene.relation is not None:
        return strict, 0.6 * objects + 0.4 * float(related)
    return strict, objects


def _best_pair(relation: str, table: np.ndarray, found: Sequence[Found]) -> tuple[float, bool]:
    """Mean object score and relation of the best (first, second); the scores decide, then the relation."""
    best = (float(table.max()) / 2, False)
    for (i, first), (j, second) in itertools.permutations(enumerate(found), 2):
        scores = table[0, i], table[1, j]
        related = min(scores) > 0 and holds(relation, (first.x, first.y), (second.x, second.y))
        best = max(best, (float(sum(scores)) / 2, related))
    return best


def wanted_scene(prompt: str) -> Scene:
    """The scene that a prompt asks for.

    Raises:
        RewardError: it is no caption of this world.
    """
    try:
        return parse(prompt)
    except ValueError as error:
        raise RewardError(f"reward 'shapes': {error}") from None


def check_prompt(prompt: str, metadata: dict) -> None:
    """Raise RewardError for a prompt that is no caption of this world, before anything is loaded."""
    wanted_scene(prompt)


def build(config: Config) -> Reward:
    def one(image: Tensor, prompt: str) -> tuple[float, float]:
        scene = wanted_scene(prompt)
        pixels = image.detach().float().cpu().numpy()
        if not np.isfinite(pixels).all():
            return math.nan, math.nan
        return score_scene(scene, detect(pixels), config.surplus_penalty)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        pairs = [one(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        strict, partial = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
        return {"shapes_strict": strict, "shapes_partial": partial}

    return Reward(score, CARD)
