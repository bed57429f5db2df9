"""Filmstrips: the frames of saved videos in a row, several models below each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowrl.media import media

SCALE, LABEL, CAPTION, GAP = 2, 96, 18, 2
"""Times that pixels are enlarged, width of the names, height of a caption, and between frames, in pixels."""
INK, RIGHT, WRONG = (36, 41, 47), (46, 160, 67), (207, 34, 46)


def drawn(count: int, shown: int) -> list[int]:
    """Numbers of so many captions of all, drawn with a fixed seed, ascending."""
    return sorted(np.random.default_rng(0).choice(count, size=min(shown, count), replace=False).tolist())


def strips(
    rows: Mapping[str, Path], captions: Mapping[int, str], right: Mapping[tuple[str, int], bool] | None = None
) -> Image.Image:
    """A block for each caption, in it a row for each folder of `rows`, by its name.

    `right` says of (name, number) whether the video is right: a green bar in front of it, or a red one.

    Raises:
        SystemExit: a folder has no video of a caption.
    """
    videos = {
        (number, name): [frame.convert("RGB") for frame in _read(place, number)]
        for number in captions
        for name, place in rows.items()
    }
    first = next(iter(videos.values()))
    side = SCALE * first[0].width
    block = CAPTION + len(rows) * (side + GAP)
    sheet = Image.new("RGB", (LABEL + len(first) * (side + GAP), len(captions) * block), (255, 255, 255))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for place, (number, caption) in enumerate(captions.items()):
        pen.text((LABEL, place * block + 2), caption, fill=INK, font=font)
        for line, name in enumerate(rows):
            top = place * block + CAPTION + line * (side + GAP)
            pen.multiline_text((4, top + side // 2 - 13), name.replace(" ", "\n", 1), fill=INK, font=font)
            if right is not None:
                pen.rectangle((LABEL - 7, top, LABEL - 4, top + side - 1), RIGHT if right[name, number] else WRONG)
            for step, frame in enumerate(videos[number, name]):
                sheet.paste(frame.resize((side, side), Image.Resampling.NEAREST), (LABEL + step * (side + GAP), top))
    return sheet


def _read(folder: Path, number: int) -> list[Image.Image]:
    file = media.find(folder / f"{number:05d}-0")
    if file is None:
        raise SystemExit(f"{folder} has no video of caption {number}: run the cells here, the pictures are theirs")
    return media.read_frames(file)
