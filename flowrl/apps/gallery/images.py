"""Selection and embedding of the report's images and videos."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
from PIL import Image

from flowrl.apps.gallery.places import OWN, PAGE
from flowrl.apps.gallery.results import Metric, paired, shared
from flowrl.apps.gallery.runs import Evaluation, Run
from flowrl.apps.gallery.tags import in_order, spread
from flowrl.core.errors import ConfigError
from flowrl.media import media

SELECTION_SEED = 0
"""Seed of the shown pairs and of ties; fixed, so that nobody chooses after seeing the results."""

NUM_PAIRS = 24
MAX_FILMS, MAX_GAINS, MAX_FRAMES = 8, 4, 9
"""Rows of the filmstrip, those among them that are chosen by their gain, and columns."""
PAIR_PX, FRAME_PX = 384, 192
"""Longest side of an embedded image, in pixels."""
SHEET_PX = 1024
"""Longest side of an embedded contact sheet, in pixels."""
VIDEO_PX, VIDEO_FRAMES, VIDEO_QUALITY = 192, 24, 60
"""Largest side of an embedded video in pixels, number of frames (evenly spaced), and quality of WebP."""
_GAP_PX, _BLOCK_PX = 2, 16
"""Smallest gap between the frames of a video in its image, and side of WebP's blocks, in pixels."""
_COLUMNS = (3, 4, 5)
"""Frames side by side in the image of a video, for more than three: what leaves the fewest places empty."""

Pair = tuple[int, int]
"""(prompt index, seed index)."""


class Place(Protocol):
    """Where a page is: how it shows the files of runs, and how it links to the pages of its runs."""

    def image(self, path: Path | None, limit_px: int, *, cells: int = 1, quality: int = 82) -> dict[str, Any] | None:
        """Values of the template's `image` about a file, shown with at most `limit_px` a side; as for `encoded`."""
        ...

    def own_page(self, run: Run, number: int) -> str:
        """Address of the own page of the run with this number on the page; "": it has none."""
        ...


def image_values(
    source: str, width: int, height: int, *, pixelated: bool, reel: "Reel | None", link: str | None
) -> dict[str, Any]:
    """Values of the template's `image`, which has no anchor yet."""
    size = {"width": width, "height": height}
    return {"src": source, **size, "pixelated": pixelated, "reel": reel, "id": None, "again": None, "link": link}


@dataclass(frozen=True)
class OnDisk:
    """A page in one file, which has its images in it."""

    folder: Path
    """Folder of the page."""

    def image(self, path: Path | None, limit_px: int, *, cells: int = 1, quality: int = 82) -> dict[str, Any] | None:
        """As `encoded` makes it, with a relative link to a file that is shown smaller; None if the file is.

        Raises ConfigError: the file is not an image.
        """
        if path is None:
            return None
        made = encoded(path, limit_px, cells=cells, quality=quality)
        source = f"data:image/{made.kind};base64,{base64.b64encode(made.data).decode('ascii')}"
        link = None if made.whole else self._address(path) or None
        return image_values(source, made.width, made.height, pixelated=made.pixelated, reel=made.reel, link=link)

    def own_page(self, run: Run, number: int) -> str:
        page = run.folder / OWN / PAGE
        return self._address(page) if page.is_file() else ""

    def _address(self, file: Path) -> str:
        """Relative address of a file; "" where the page shares only the root with it: the address would be its path."""
        here, there = self.folder.resolve(), file.resolve()
        return quote(Path(os.path.relpath(there, here)).as_posix()) if here.parts[:2] == there.parts[:2] else ""


@dataclass(frozen=True, slots=True)
class Reel:
    """A video as one image, its frames row by row: the page plays them, and on paper they are a filmstrip."""

    frames: int
    """Number of frames that are in it."""
    columns: int
    frame_ms: float
    """Time of each, in ms: they take as long as the file."""
    exact: bool
    """Without loss."""

    @classmethod
    def of(cls, frames: int, fps: float, size: tuple[int, int]) -> "Reel":
        """That of a file with so many frames of (width, height) at so many a second."""
        kept = min(frames, VIDEO_FRAMES)
        columns = kept if kept <= _COLUMNS[0] else min(_COLUMNS, key=lambda count: (-kept % count, -count))
        return cls(kept, columns, round(1000 * frames / fps / kept, 3), max(size) < media.SMALL_PX)

    def cell(self, side: int) -> int:
        """Pixels of a side from one frame to the next: a gap, and whole blocks of WebP, which would mix two frames."""
        return side + _GAP_PX if self.exact else -(-(side + _GAP_PX) // _BLOCK_PX) * _BLOCK_PX

    @property
    def rows(self) -> int:
        return -(-self.frames // self.columns)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image or video as a browser shows it."""

    data: bytes
    kind: str
    """Kind of file: png or webp."""
    width: int
    """Of the image, or of a frame, in pixels."""
    height: int
    pixelated: bool
    """Whether the page enlarges it without smoothing."""
    whole: bool
    """Whether nothing of the file was left out."""
    reel: Reel | None = None
    """How the frames of a video lie in the image; None: it is an image."""


def imaged(run: Run) -> np.ndarray:
    """[P, K] bool: whether both images of a shared pair were saved."""
    result = shared(run)
    for p, k in np.argwhere(result):
        result[p, k] = all(evaluation.image(p, k) is not None for evaluation in run.both)
    return result


def draw_pairs(available: np.ndarray) -> list[Pair]:
    """Up to `NUM_PAIRS` of the pairs in `available` [P, K], no two of one prompt, ascending.

    The draw depends on `SELECTION_SEED` and on which images exist, not on scores or images, so it is the same for
    every run over the same evaluation set.
    """
    pairs = [(int(p), int(k)) for p, k in np.argwhere(available)]
    one_each: dict[int, int] = {}
    for i in np.random.default_rng(SELECTION_SEED).permutation(len(pairs)):
        one_each.setdefault(*pairs[i])
    return sorted(list(one_each.items())[:NUM_PAIRS])


def largest_drops(gain: np.ndarray, available: np.ndarray) -> list[Pair]:
    """Up to `NUM_PAIRS` pairs with gain [P, K] < 0, largest drop first.

    Among equal drops, which are frequent for pass or fail metrics, pairs with images come first, then a fixed random
    order, so that the order in the file does not matter.
    """
    tie = np.random.default_rng(SELECTION_SEED).random(gain.shape)
    worst_first = np.lexsort((tie.ravel(), ~available.ravel(), gain.ravel()))
    order = zip(*np.unravel_index(worst_first, gain.shape), strict=True)
    # NaN < 0 is false, so pairs without a score are left out.
    return [(int(p), int(k)) for p, k in order if gain[p, k] < 0][:NUM_PAIRS]


def film(run: Run, metrics: list[Metric], place: Place) -> dict[str, Any]:
    """Prompts over training at the first seed: the first ones, then others with the largest gain over the base.

    Returns:
        {"frames": labels, "left_out": number of evaluations in between, "rows": one for each prompt, "gains": how many
        rows at the end were chosen by their gain}.
    """
    found, base = in_order(run.evaluations, finished=run.finished), run.base
    frames = spread(found, MAX_FRAMES)
    result = {"frames": [e.column for e in frames], "left_out": len(found) - len(frames), "rows": [], "gains": 0}
    if base is None or not run.during or not metrics:
        return result

    def saved(p: int) -> list[bool]:
        """Whether each frame has the prompt's image; []: none during training, as of later prompts."""
        same = [e.prompts[p : p + 1] == (base.prompts[p],) and e.seeds[:1] == base.seeds[:1] for e in frames]
        known = [ok and e.image(p, 0) is not None for ok, e in zip(same, frames, strict=True)]
        return known if any(ok and e.in_training for ok, e in zip(known, frames, strict=True)) else []

    first = list(islice((p for p in range(len(base.prompts)) if any(saved(p))), MAX_FILMS))
    before, after = paired(run, metrics[0].name)
    gain = metrics[0].sign * (after - before)[:, 0]
    others = [p for p in np.argsort(-gain, kind="stable").tolist() if gain[p] > 0 and p not in first[:MAX_GAINS]]
    gained = list(islice((p for p in others if saved(p)[-1:] == [True]), MAX_GAINS))
    for p in [p for p in first if p not in gained][: MAX_FILMS - len(gained)] + gained:
        cells = [_frame(e, metrics[0], p, ok, place) for ok, e in zip(saved(p), frames, strict=True)]
        given = [place.image(file, FRAME_PX) for file in list(base.given(p).values())[:1]]
        row = {"prompt_id": p, "text": base.prompts[p], "seed": base.seeds[0], "given": given, "cells": cells}
        result["rows"].append(row)
    return result | {"gains": len(gained)}


def encoded(path: Path, limit_px: int, *, cells: int = 1, quality: int = 82) -> Encoded:
    """An image or video of at most `limit_px` a side.

    Small images stay exact (PNG, enlarged without smoothing by the page); others become WebP of `quality`. A video is
    one WebP with its frames, `VIDEO_FRAMES` of at most `VIDEO_PX`, exact where they are small. A contact sheet has
    `cells` images along its longest side; of one of videos it is the middle frame.

    Raises ConfigError: the file is not an image, or needs the extra `video`.
    """
    try:
        fps = media.facts(path)[1]
        frames = media.read_frames(path)
    except ConfigError:
        raise
    except media.UNREADABLE as error:
        raise ConfigError(f"{path} is not an image ({error}); delete it: the report leaves it out") from error
    full_size, small = frames[0].size, max(frames[0].size) < media.SMALL_PX * cells
    reel = Reel.of(len(frames), fps, full_size) if fps is not None and cells == 1 else None
    places = np.linspace(0, len(frames) - 1, reel.frames).round().astype(int) if reel else [len(frames) // 2]
    kept = [frames[i] for i in places]
    for frame in kept:
        limit = min(limit_px, VIDEO_PX) if reel else limit_px
        frame.thumbnail((limit, limit))
    buffer = io.BytesIO()
    if reel is not None:
        exact = {"lossless": True} if small else {"quality": min(quality, VIDEO_QUALITY)}
        _joined(kept, reel).save(buffer, "WEBP", method=2, **exact)
    elif small:
        kept[0].save(buffer, "PNG", optimize=True)
    else:
        # A third of the default method's time, and 5 % larger.
        kept[0].save(buffer, "WEBP", quality=quality, method=2)
    whole = kept[0].size == full_size and len(kept) == len(frames)
    kind = "png" if small and reel is None else "webp"
    return Encoded(buffer.getvalue(), kind, kept[0].width, kept[0].height, small, whole, reel)


def _joined(frames: Sequence[Image.Image], reel: Reel) -> Image.Image:
    """Frames of one size row by row; what lies between them is transparent."""
    width, height = map(reel.cell, frames[0].size)
    result = Image.new("RGBA", (reel.columns * width, reel.rows * height))
    for number, frame in enumerate(frames):
        row, column = divmod(number, reel.columns)
        result.paste(frame, (column * width, row * height))
    return result


def _frame(evaluation: Evaluation, metric: Metric, prompt: int, saved: bool, place: Place) -> dict[str, Any]:
    table = evaluation.scores.get(metric.name)
    score = float(table[prompt, 0]) if saved and table is not None else float("nan")
    return {
        "label": evaluation.column,
        "image": place.image(evaluation.image(prompt, 0), FRAME_PX) if saved else None,
        "score": metric.single(score),
        "tone": metric.tone(score - 0.5) if metric.percent else "same",
    }
