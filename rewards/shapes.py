"""Verifier of the shapes world: does a picture show exactly what its caption asks for?

An object is found by colour, then recognised by synthesis: its antialiased coverage gives area and
centroid, every shape of that area is rendered at that place, and the best soft overlap names it.

Source: this project; the measurements behind the thresholds are in docs/lab.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from flowrl.reward import Card, Reward
from flowrl.shapes import AREA, BACKGROUND, CENTROID_Y, COLORS, PALETTE, SHAPES, ObjectSpec, Scene
from flowrl.shapes import coverage as shape_coverage
from flowrl.shapes import holds, parse

BLOB = "blob"
_OFFSETS = np.asarray([PALETTE[c] for c in COLORS], dtype=np.float32) - BACKGROUND
_LENGTHS = np.linalg.norm(_OFFSETS, axis=1)
_FOREGROUND = 0.34
_MIN_COSINE = 0.90
_MIN_OVERLAP = 0.72
_MAX_ASPECT = 1.5
# At 32 px, in pixels: smaller pieces are specks; pieces below the second number are too small to be an object.
_SPECK_PX, _OBJECT_PX = 8, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    surplus_penalty: float = 0.25
    """What each surplus object (two at most count) takes from the partial score."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised object: shape ("blob" if none fits), colour (None if no palette hue), centre in pixels."""

    shape: str
    color: str | None
    x: float
    y: float


def detect(image: np.ndarray) -> list[Found]:
    """Objects of a picture, float [3, H, W] in [0, 1]; unrecognisable pieces come back as blobs."""
    offset = image.astype(np.float32) - BACKGROUND
    value = offset.max(axis=0)
    foreground = value > _FOREGROUND
    if not foreground.any():
        return []
    dots = np.tensordot(_OFFSETS, offset, axes=1)  # [colors, H, W]
    cosine = dots / (_LENGTHS[:, None, None] * np.maximum(np.linalg.norm(offset, axis=0), 1e-6))
    nearest = np.where(cosine.max(axis=0) > _MIN_COSINE, cosine.argmax(axis=0), len(COLORS))
    nearest[~foreground] = -1
    scale = image.shape[1] * image.shape[2] / 32**2
    found: list[Found] = []
    for index in np.unique(nearest[foreground]):
        labels, count = ndimage.label(nearest == index)
        sizes = np.bincount(labels.ravel(), minlength=count + 1)
        for component in range(1, count + 1):
            if sizes[component] < _SPECK_PX * scale:
                continue
            mask = labels == component
            if index == len(COLORS):
                # Unnamed hues also line the border between touching objects: only a solid piece counts.
                if ndimage.binary_erosion(mask).sum() >= _SPECK_PX * scale / 2:
                    found.append(_blob(mask, None))
            elif sizes[component] < _OBJECT_PX * scale:
                found.append(_blob(mask, COLORS[index]))
            else:
                own = (nearest == index) | ~foreground
                alpha = np.clip(dots[index] / _LENGTHS[index] ** 2, 0.0, 1.0)
                found.append(_recognise(mask, alpha * own, COLORS[index]))
    return found


def _blob(mask: np.ndarray, color: str | None) -> Found:
    y, x = ndimage.center_of_mass(mask)
    return Found(BLOB, color, float(x), float(y))


def _recognise(mask: np.ndarray, alpha: np.ndarray, color: str) -> Found:
    """The shape whose rendering overlaps the piece best."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
    alpha = alpha * ndimage.binary_dilation(mask, structure=np.ones((3, 3)))
    area = alpha.sum()
    yy, xx = np.mgrid[0 : mask.shape[0], 0 : mask.shape[1]].astype(np.float32)
    x, y = float((alpha * xx).sum() / area), float((alpha * yy).sum() / area)
    best, name = 0.0, BLOB
    for shape in SHAPES:
        radius = float(np.sqrt(area / AREA[shape]))
        template = shape_coverage(shape, xx - x, yy - (y - CENTROID_Y[shape] * radius), radius)
        overlap = np.minimum(alpha, template).sum() / np.maximum(alpha, template).sum()
        if overlap > best:
            best, name = float(overlap), shape
    if best < _MIN_OVERLAP or max(height, width) / min(height, width) >= _MAX_ASPECT:
        return Found(BLOB, color, x, y)
    return Found(name, color, x, y - CENTROID_Y[name] * float(np.sqrt(area / AREA[name])))


def _object_score(spec: ObjectSpec, found: Found) -> float:
    """1 for the right shape in the right colour, 0.5 for colour only, 0.25 for shape only."""
    shape = found.shape == spec.shape
    if spec.color is None:
        return 1.0 if shape else 0.0
    color = found.color == spec.color
    return 1.0 if shape and color else 0.5 if color else 0.25 if shape else 0.0


def judge(scene: Scene, found: Sequence[Found], surplus_penalty: float = 0.25) -> tuple[float, float]:
    """(strict, partial) of the found objects against the scene.

    strict is 1 where the multiset of objects and the relation are exactly the asked ones, else 0.
    partial in [0, 1] is the mean object score under the best assignment, less the surplus penalty;
    for `position` 0.6 of that and 0.4 for the relation between the two assigned objects.
    """
    wanted = len(scene.objects)
    if not found:
        return 0.0, 0.0
    # More than six pieces is noise: the largest assignments are still tried on the first six.
    candidates: list[Found | None] = [*found[:6], *([None] * wanted)]
    best, best_relation, exact = -1.0, False, False
    for choice in itertools.permutations(candidates, wanted):
        scores = [_object_score(spec, item) if item else 0.0 for spec, item in zip(scene.objects, choice, strict=True)]
        related = scene.relation is None
        if scene.relation and choice[0] and choice[1]:
            first, second = choice[0], choice[1]
            related = min(scores) > 0 and holds(scene.relation, (first.x, first.y), (second.x, second.y))
        total = sum(scores) / wanted
        if (total, related) > (best, best_relation):
            best, best_relation = total, related
        exact = exact or (total == 1.0 and related)
    surplus = min(max(len(found) - wanted, 0), 2)
    strict = float(exact and len(found) == wanted)
    objects = max(best - surplus_penalty * surplus, 0.0)
    if scene.relation is not None:
        return strict, 0.6 * objects + 0.4 * float(best_relation)
    return strict, objects


def build(config: Config) -> Reward:
    def score(images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        pictures = images.detach().float().cpu().numpy()
        pairs = [
            judge(parse(prompt), detect(picture), config.surplus_penalty)
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]
        strict, partial = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
        return {"shapes_strict": strict, "shapes_partial": partial}

    return Reward(
        score=score,
        card=Card(
            outputs=("shapes_strict", "shapes_partial"),
            low=0.0,
            high=1.0,
            modality="image",
            level="tested",
            licence="Apache-2.0 (this project)",
            source="flowrl lab",
        ),
    )
