"""Selection and embedding of the report's images and videos."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from flowrl.core import media
from flowrl.core.errors import ConfigError
from flowrl.gallery.results import Metric, paired, shared
from flowrl.gallery.runs import Evaluation, Run

SELECTION_SEED = 0
"""Seed of the shown pairs and of ties; fixed, so that nobody chooses after seeing the results."""

NUM_PAIRS = 24
MAX_FILMS, MAX_FRAMES = 8, 9
PAIR_PX, FRAME_PX = 384, 192
"""Longest side of an embedded image, in pixels."""
SHEET_PX = 1024
"""Longest side of an embedded contact sheet, in pixels."""
VIDEO_PX, VIDEO_FRAMES = 192, 16
"""Longest side of an embedded video in pixels, and its largest number of frames, evenly spaced."""

Pair = tuple[int, int]
"""(prompt index, seed index)."""


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


def card(run: Run, metrics: list[Metric], pair: Pair, section: str, page_folder: Path) -> dict[str, Any]:
    """Base and tuned on one prompt and seed, with every score; its anchor begins with `section`."""
    (base, tuned), (p, k) = run.both, pair
    scores = []
    for metric in metrics:
        before, after = (float(table[p, k]) for table in paired(run, metric.name))
        scores.append(
            {
                "label": metric.label,
                "before": metric.single(before),
                "after": metric.single(after),
                "change": metric.single_change(after - before),
                "delta": after - before,
                "tone": metric.tone(after - before),
            }
        )
    return {
        "anchor": f"{section}-{p:05d}-{k}",
        "prompt_id": p,
        "text": base.prompts[p],
        "seed": base.seeds[k],
        "before": embed(base.image(p, k), PAIR_PX, page_folder),
        "after": embed(tuned.image(p, k), PAIR_PX, page_folder),
        "scores": scores,
        "tone": scores[0]["tone"],
    }


def film(run: Run, metrics: list[Metric], page_folder: Path) -> dict[str, Any]:
    """The first prompts over training at the first seed: {"frames": labels, "rows": one for each prompt}."""
    frames, base = _frames(run), run.base
    rows: list[dict[str, Any]] = []
    for p, text in enumerate(base.prompts if base and run.during and metrics else ()):
        if len(rows) == MAX_FILMS:
            break
        seeds = base.seeds if base else frames[0].seeds
        same = [p < len(e.prompts) and e.prompts[p] == text and e.seeds[:1] == seeds[:1] for e in frames]
        saved = [ok and e.image(p, 0) is not None for ok, e in zip(same, frames, strict=True)]
        # Later prompts have images of the base and tuned models alone.
        if not any(ok and e.tag.startswith("iteration-") for ok, e in zip(saved, frames, strict=True)):
            continue
        cells = [_frame(e, metrics[0], p, ok, page_folder) for ok, e in zip(saved, frames, strict=True)]
        rows.append({"prompt_id": p, "text": text, "seed": seeds[0], "cells": cells})
    return {"frames": [_frame_label(e) for e in frames], "rows": rows}


def embed(path: Path | None, limit_px: int, page_folder: Path, *, cells: int = 1) -> dict[str, Any] | None:
    """An image or video for the page; None if the file is.

    Small images stay exact (PNG, enlarged without smoothing by the page); others become WebP of at most `limit_px`,
    with a relative link to the file. Videos are animated WebP of at most `VIDEO_PX` and `VIDEO_FRAMES` that play as
    long as the file. A contact sheet has `cells` images along its longest side.

    Raises:
        ConfigError: the file is not an image.
    """
    if path is None:
        return None
    try:
        frames = media.read_frames(path)
    except media.UNREADABLE as error:
        raise ConfigError(f"{path} is not an image ({error}); delete it: the report leaves it out") from error
    video, full_size = len(frames) > 1, frames[0].size
    kept = [frames[i] for i in np.linspace(0, len(frames) - 1, min(len(frames), VIDEO_FRAMES)).round().astype(int)]
    for frame in kept:
        frame.thumbnail((min(limit_px, VIDEO_PX * cells),) * 2 if video else (limit_px, limit_px))
    small = max(full_size) < media.SMALL_PX * cells
    buffer = io.BytesIO()
    if video:
        frame_ms = round(media.FRAME_MS * len(frames) / len(kept))
        media.write_video(kept, buffer, quality=60, frame_ms=frame_ms)
    elif small:
        kept[0].save(buffer, "PNG", optimize=True)
    else:
        kept[0].save(buffer, "WEBP", quality=82)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    whole = kept[0].size == full_size and len(kept) == len(frames)
    return {
        "src": f"data:image/{'png' if small and not video else 'webp'};base64,{data}",
        "width": kept[0].width,
        "height": kept[0].height,
        "pixelated": small,
        "link": None if whole else quote(Path(os.path.relpath(path, page_folder)).as_posix()),
    }


def _frames(run: Run) -> list[Evaluation]:
    """Base, evaluations during training, tuned: at most `MAX_FRAMES`, evenly spaced, with both ends."""
    tuned = run.evaluations.get("tuned")
    # The last evaluation during training may have the weights of the tuned model.
    during = [e for e in run.during if tuned is None or e.iteration != tuned.iteration]
    frames = [e for e in (run.base, *during, tuned) if e is not None]
    chosen = np.linspace(0, len(frames) - 1, min(MAX_FRAMES, len(frames)))
    return [frames[i] for i in chosen.round().astype(int)]


def _frame_label(evaluation: Evaluation) -> str:
    if evaluation.tag.startswith("iteration-"):
        return str(evaluation.iteration)
    return f"{evaluation.tag} ({evaluation.iteration})" if evaluation.iteration else evaluation.tag


def _frame(evaluation: Evaluation, metric: Metric, prompt: int, saved: bool, page_folder: Path) -> dict[str, Any]:
    table = evaluation.scores.get(metric.name)
    score = float(table[prompt, 0]) if saved and table is not None else float("nan")
    return {
        "label": _frame_label(evaluation),
        "picture": embed(evaluation.image(prompt, 0), FRAME_PX, page_folder) if saved else None,
        "score": metric.single(score),
        "tone": {1.0: "better", 0.0: "worse"}.get(score, "same") if metric.percent else "same",
    }
