"""Objects of an image of the shapes world, and what no object explains.

An image is first averaged down to about 32 x 32 cells, so a cell is 1 px at 32 px, 2 at 64 and 4 at 128. A piece is a
connected region of one palette hue. It is recognised by synthesis: its coverage, with the level of its own inside as
1, gives area and centroid, every shape of that area is rendered at that place, and the best soft overlap names it,
where it leads the second.

Then the whole image is explained by the background and every piece in its own measured colour, with the coverage of
its shape, give or take a rim. What is left over is bounded in area, in energy and in every neighbourhood.
Beyond a bound it counts as one more object: nothing drawn beside the objects goes unseen, be it solid, thin, faint or
fine.

Source: this project; `python tests/rewards/test_rewards_shapes.py` prints the accuracy behind the thresholds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from flowrl.shapes import AREA, BACKGROUND, CENTROID_Y, COLORS, PALETTE, SHAPES, coverage, distance

BLOB = "blob"
_OFFSETS = np.asarray([PALETTE[c] for c in COLORS], dtype=np.float32) - np.float32(BACKGROUND)
_LENGTHS = np.linalg.norm(_OFFSETS, axis=1)
_UNNAMED = len(COLORS)
_LUMA = np.asarray((0.299, 0.587, 0.114), dtype=np.float32)
_SIDE = 32
"""Lengths and areas below are in cells of an image of _SIDE x _SIDE; those of an oblong image have the same area."""
_CHUNK = 64
"""Images recognised in one go: enough for numpy, few enough for the processor's cache."""
_FOREGROUND = 0.34
# Neighbouring hues are 35 to 45 degrees apart. A cell may be 26 off, so that noise does not tear a shape;
# a whole piece, whose noise averages out, may be 13 off, which leaves every hue halfway between unnamed.
_MIN_CELL_COSINE = 0.90
_MIN_PIECE_COSINE = 0.974
# With noise of std 0.08 or as JPEG of quality 90, shapes overlap with their template by 0.87 or more, and lead by 0.08;
# two of them grown together overlap by 0.82 or less, even without noise. A circle and a square of one area share 0.83.
_MIN_OVERLAP = 0.84
_MIN_LEAD = 0.025
# Level of a piece's inside, 1 being the palette's: an image of 0.85 of the brightness, saved as JPEG, has 0.69.
_MIN_LEVEL, _MAX_LEVEL = 0.6, 1.3
# Smaller pieces are specks; pieces below the second number are too small to be an object.
_SPECK, _OBJECT = 8, 16
_RIM = 1.2
"""Distance from the edge of a recognised shape where any coverage is allowed: there its overlap judges."""
# What may be left over. With noise of std 0.08 or JPEG of quality 90: at most 2 cells above the level, 0.015 in mean,
# 0.041 in the mean of a window of 4 x 4, 0.16 as its colour.
_LEFT_LEVEL, _LEFT_CELLS = 0.4, 3
_LEFT_ENERGY, _LEFT_WINDOW_ENERGY, _LEFT_WINDOW_COLOR = 0.02, 0.055, 0.17
_WINDOW = 4
_MAX_BORDER, _MAX_FOREGROUND = 0.1, 0.5
"""Shares of the outermost cells and of all that may be foreground: objects stand on a background."""
_PLANE = np.zeros((3, 3, 3), dtype=bool)
_PLANE[1] = [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
_BLOCK = np.zeros((3, 3, 3), dtype=bool)
_BLOCK[1] = True


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised object: shape ("blob" if none fits), colour (None if no palette hue), centre and radius in pixels.

    The radius of a leftover is NaN, and `excess` how many times over the widest of its bounds the image is.
    """

    shape: str
    color: str | None
    x: float
    y: float
    radius: float = math.nan
    excess: float = math.inf


def detect(image: np.ndarray) -> list[Found]:
    """Objects of an image, float [3, H, W] in [0, 1]; unrecognisable pieces and leftovers are blobs."""
    return detect_all(image[None])[0]


def detect_all(images: np.ndarray) -> list[list[Found]]:
    """`detect` for every image of [B, 3, H, W]."""
    parts = [_detect(images[i : i + _CHUNK].astype(np.float32)) for i in range(0, len(images), _CHUNK)]
    return [found for part in parts for found in part]


def _detect(images: np.ndarray) -> list[list[Found]]:
    means, fine = _cells(images)
    offset = means - np.float32(BACKGROUND)
    pieces = _pieces(offset)
    inside = _inside(pieces)
    shapes = _recognise(pieces, inside)
    found: list[list[Found]] = [[] for _ in images]
    for n, image in enumerate(pieces.image):
        shape = SHAPES[shapes.best[n]] if shapes.fits[n] else BLOB
        color = COLORS[pieces.hue[n]] if pieces.named[n] else None
        found[image].append(Found(shape, color, float(shapes.x[n]), float(shapes.y[n]), float(shapes.radius[n])))
    left = _left_over(offset, fine, pieces, inside, shapes)
    too_much, no_background = _too_much(left), _no_background(offset)
    for image in np.flatnonzero(too_much | no_background):
        excess = math.inf if no_background[image] else _excess(left, int(image))
        found[image] += [replace(each, excess=excess) for each in _strangers(left.energy[image])]
    down, across = (full / cells for full, cells in zip(images.shape[-2:], offset.shape[-2:], strict=True))
    if down == across == 1:
        return found
    return [[_in_pixels(f, down, across) for f in each] for each in found]


def _in_pixels(found: Found, down: float, across: float) -> Found:
    """An object whose lengths were in cells, of so many pixels each."""
    x, y = (found.x + 0.5) * across - 0.5, (found.y + 0.5) * down - 0.5
    return replace(found, x=x, y=y, radius=found.radius * math.sqrt(down * across))


@cache
def _averager(pixels: int, cells: int) -> np.ndarray:
    """[cells, pixels]: the share of every pixel in the mean of every cell."""
    edges = np.arange(cells + 1) * (pixels / cells)
    place = np.arange(pixels)
    shared = np.minimum(edges[1:, None], place + 1) - np.maximum(edges[:-1, None], place)
    return (np.maximum(shared, 0) * (cells / pixels)).astype(np.float32)


def _cells(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean colour of every cell [B, 3, h, w], and the variance inside it, summed over colours [B, h, w]."""
    height, width = images.shape[-2:]
    stretch = math.sqrt(height * width) / _SIDE
    h, w = max(round(height / stretch), 1), max(round(width / stretch), 1)
    if (h, w) == (height, width):
        return images, np.zeros((1, 1, 1), dtype=np.float32)
    down, across = _averager(height, h), _averager(width, w).T
    means = down @ images @ across
    variance = down @ np.square(images).sum(1) @ across - np.square(means).sum(1)
    return means, np.maximum(variance, 0.0)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Connected regions of one hue, N of them, by image; masks and maps are [N, h, w]."""

    image: np.ndarray
    hue: np.ndarray
    size: np.ndarray
    named: np.ndarray
    """Whether the piece's mean colour is near enough to its hue."""
    mask: np.ndarray
    near: np.ndarray
    """The piece and the cells that touch it, without those of other pieces."""
    offset: np.ndarray
    """[N, 3, h, w] of its image, from the background."""
    cover: np.ndarray
    """Coverage by the hue, before its level is known."""


def _pieces(offset: np.ndarray) -> _Pieces:
    """Every region of at least _SPECK cells, at offsets [B, 3, h, w] from the background."""
    along = np.stack([np.tensordot(o, offset, axes=(0, 1)) for o in _OFFSETS / _LENGTHS[:, None]], axis=1)
    best = along.argmax(axis=1)
    sure = along.max(axis=1) > _MIN_CELL_COSINE * np.sqrt(np.square(offset).sum(axis=1))
    best = np.where(offset.max(axis=1) > _FOREGROUND, np.where(sure, best, _UNNAMED), -1)
    counts = np.stack([np.count_nonzero(best == hue, axis=(1, 2)) for hue in range(_UNNAMED)], axis=1)
    # One plane for each hue of each image; labels ascend with the planes.
    image, hue = (counts >= _SPECK).nonzero()
    labels = np.zeros((len(image), *best.shape[1:]), dtype=np.int32)
    ndimage.label(best[image] == hue[:, None, None], _PLANE, output=labels)
    sizes = np.bincount(labels.ravel())
    kept = np.flatnonzero(sizes[1:] >= _SPECK) + 1
    last = np.maximum.accumulate(labels.reshape(len(labels), -1).max(axis=1)) if len(labels) else sizes[:0]
    plane = np.searchsorted(last, kept)
    mask = labels[plane] == kept[:, None, None]
    image, hue = image[plane], hue[plane]
    taken = np.zeros(best.shape, dtype=bool)
    np.logical_or.at(taken, image, mask)
    near = mask | (ndimage.binary_dilation(mask, _BLOCK) & ~taken[image])
    mine = offset[image]
    total = (mine * mask[:, None]).sum(axis=(2, 3))
    named = (total * _OFFSETS[hue]).sum(axis=1) > _MIN_PIECE_COSINE * _LENGTHS[hue] * np.linalg.norm(total, axis=1)
    cover = along[image, hue] / _LENGTHS[hue][:, None, None]
    return _Pieces(image, hue, sizes[kept], named, mask, near, mine, cover)


class _Shapes(NamedTuple):
    """What N pieces are: index of the best shape, its radius and centre, whether it fits, and the level inside."""

    best: np.ndarray
    radius: np.ndarray
    x: np.ndarray
    y: np.ndarray
    fits: np.ndarray
    level: np.ndarray


def _inside(pieces: _Pieces) -> np.ndarray:
    """Weights [N, h, w] of sum 1 that all but leave out the rim of every piece."""
    weights = _windows(pieces.cover * pieces.mask, 3)
    weights = np.square(np.square(weights)) * pieces.mask
    return weights / weights.sum(axis=(1, 2), keepdims=True)


def _recognise(pieces: _Pieces, inside: np.ndarray) -> _Shapes:
    """Shapes by the coverage of the hue; where none fits by that of the brightness, whose edges JPEG keeps sharp."""
    shapes = _synthesised(pieces.cover * pieces.near, inside)
    again = np.flatnonzero(pieces.named & ~shapes.fits)
    if again.size:
        full = (_OFFSETS @ _LUMA)[pieces.hue[again]]
        luma = np.tensordot(_LUMA, pieces.offset[again], axes=(0, 1)) / full[:, None, None]
        other = _synthesised(luma * pieces.near[again], inside[again])
        for mine, its in zip(shapes, other, strict=True):
            mine[again[other.fits]] = its[other.fits]
    right = pieces.named & (pieces.size >= _OBJECT) & (shapes.level > _MIN_LEVEL) & (shapes.level < _MAX_LEVEL)
    shapes.fits[~right] = False
    return shapes


def _synthesised(cover: np.ndarray, inside: np.ndarray) -> _Shapes:
    """Every piece beside each shape of its area at its place; `cover` is 0 outside of the pieces."""
    level = (inside * cover).sum(axis=(1, 2))
    alpha = np.clip(cover / level[:, None, None], 0.0, 1.0)
    rows, columns = _raster(cover)
    area = alpha.sum(axis=(1, 2))
    x, y = (alpha.sum(axis=1) @ columns[0]) / area, (alpha.sum(axis=2) @ rows[:, 0]) / area
    overlap, radius, top = (np.empty((len(SHAPES), len(area)), dtype=np.float32) for _ in range(3))
    for k, shape in enumerate(SHAPES):
        radius[k] = np.sqrt(area / AREA[shape])
        top[k] = y - CENTROID_Y[shape] * radius[k]
        template = coverage(shape, columns - _each(x), rows - _each(top[k]), _each(radius[k]))
        # The template has the piece's area by construction, also where it leaves the image.
        shared = np.minimum(alpha, template).sum(axis=(1, 2))
        overlap[k] = shared / (2 * area - shared)
    second, first = np.sort(overlap, axis=0)[-2:]
    best = overlap.argmax(axis=0)
    chosen = best, np.arange(len(best))
    return _Shapes(best, radius[chosen], x, top[chosen], (first > _MIN_OVERLAP) & (first - second > _MIN_LEAD), level)


def _raster(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [h, 1] and columns [1, w] of maps [N, h, w]."""
    return np.arange(maps.shape[1], dtype=np.float32)[:, None], np.arange(maps.shape[2], dtype=np.float32)[None]


def _windows(maps: np.ndarray, side: int) -> np.ndarray:
    """Mean of maps [..., h, w] over the window of side x side around every cell, 0 beyond the image."""
    along = ndimage.uniform_filter1d(maps, side, axis=-1, mode="constant")
    return ndimage.uniform_filter1d(along, side, axis=-2, mode="constant")


def _each(values: np.ndarray) -> np.ndarray:
    """[N, 1, 1] of [N]."""
    return values[:, None, None]


class _Leftover(NamedTuple):
    """What no piece explains: colour [B, 3, h, w], and energy [B, h, w] with the variance inside the cells."""

    color: np.ndarray
    energy: np.ndarray


def _left_over(offset: np.ndarray, fine: np.ndarray, pieces: _Pieces, inside: np.ndarray, shapes: _Shapes) -> _Leftover:
    """Offsets less every piece in its own colour: within a shape whole, in its rim of any coverage, beyond it none.

    A piece that is no shape counts as an object already, and explains all that is near it.
    """
    rows, columns = _raster(pieces.cover)
    paint = (inside[:, None] * pieces.offset).sum(axis=(2, 3))
    edge = np.empty_like(pieces.cover)
    for k, shape in enumerate(SHAPES):
        own = shapes.best == k
        edge[own] = distance(
            shape, columns - _each(shapes.x[own]), rows - _each(shapes.y[own]), _each(shapes.radius[own])
        )
    least, most = np.clip(0.5 - _RIM - edge, 0.0, 1.0), np.clip(0.5 + _RIM - edge, 0.0, 1.0)
    color, fine = offset.copy(), np.broadcast_to(fine, offset[:, 0].shape).copy()
    slots = np.arange(len(paint)) - np.searchsorted(pieces.image, pieces.image)
    for slot in range(slots.max(initial=-1) + 1):
        n = np.flatnonzero(slots == slot)
        at = pieces.image[n]
        power = np.square(paint[n]).sum(axis=1)
        amount = np.einsum("nchw,nc->nhw", color[at], paint[n] / power[:, None])
        amount = np.clip(amount, least[n], most[n])
        blob = ~shapes.fits[n]
        color[at] -= amount[:, None] * paint[n][:, :, None, None]
        # Two colours in one cell, half and half, are a quarter of their distance squared.
        fine[at] -= 0.25 * _each(power) * (most[n] > least[n])
        where = blob[:, None, None] & pieces.near[n]
        color[at] *= ~where[:, None]
        fine[at] *= ~where
    return _Leftover(color, np.square(color).sum(axis=1) + np.maximum(fine, 0.0))


def _too_much(left: _Leftover) -> np.ndarray:
    """[B] where more is left over than noise and compression leave of a right image."""
    energy = _windows(left.energy, _WINDOW)
    color = _windows(left.color, _WINDOW)
    return (
        (np.count_nonzero(left.energy > _LEFT_LEVEL**2, axis=(1, 2)) > _LEFT_CELLS)
        | (left.energy.mean(axis=(1, 2)) > _LEFT_ENERGY)
        | (energy.max(axis=(1, 2)) > _LEFT_WINDOW_ENERGY)
        | (np.square(color).sum(axis=1).max(axis=(1, 2)) > _LEFT_WINDOW_COLOR**2)
    )


def _excess(left: _Leftover, image: int) -> float:
    """How many times over its bound the largest of the left-over measures of an image is."""
    energy, color = left.energy[image], left.color[image]
    measures = (
        np.count_nonzero(energy > _LEFT_LEVEL**2) / _LEFT_CELLS,
        energy.mean() / _LEFT_ENERGY,
        _windows(energy, _WINDOW).max() / _LEFT_WINDOW_ENERGY,
        np.square(_windows(color, _WINDOW)).sum(axis=0).max() / _LEFT_WINDOW_COLOR**2,
    )
    return float(max(measures))


def _no_background(offset: np.ndarray) -> np.ndarray:
    """[B] where foreground fills the image, or its outermost cells."""
    foreground = offset.max(axis=1) > _FOREGROUND
    inner = np.zeros(foreground.shape[1:], dtype=bool)
    inner[1:-1, 1:-1] = True
    return (foreground.mean(axis=(1, 2)) > _MAX_FOREGROUND) | (foreground[:, ~inner].mean(axis=1) > _MAX_BORDER)


def _strangers(energy: np.ndarray) -> list[Found]:
    """One blob for each solid region of what is left over in an image, and one where there is none."""
    labels = np.zeros(energy.shape, dtype=np.int32)
    ndimage.label(energy > _LEFT_LEVEL**2, _BLOCK[1], output=labels)
    solid = np.flatnonzero(np.bincount(labels.ravel())[1:] >= _SPECK) + 1
    masks = [labels == label for label in solid] or [np.ones(labels.shape, dtype=bool)]
    return [_stranger((energy + 1e-6) * mask) for mask in masks]


def _stranger(weight: np.ndarray) -> Found:
    rows, columns = _raster(weight[None])
    total = weight.sum()
    return Found(BLOB, None, float((weight * columns).sum() / total), float((weight * rows).sum() / total))
