"""The images of base and tuned on one page: each embedded once, at a size that keeps the page small."""

import bisect
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.apps.gallery.images import Place
from flowrl.core.assets import table

PAGE_BYTES = 15_000_000
"""Largest size of a page in bytes."""

Files = tuple[Path, ...]
"""Files of one pair: (base, tuned), then what its prompt edits."""


@dataclass(frozen=True, slots=True)
class Size:
    """How the images of a page are embedded."""

    main_px: int
    """Longest side of the first seed of a prompt and of the cards further up, in pixels."""
    further_px: int
    """Longest side of the other seeds; 0: they are left out."""
    quality: int
    """Quality of WebP, 0 to 100."""


SIZES = tuple(Size(*row) for row in table(Path(__file__).with_name("tables.yaml"))["sizes"])
"""What is tried, the best first and never larger than the one before."""

_SAMPLED = 12
"""Pairs of either kind from whose sizes those of all are estimated."""
_SLACK = 1.06
"""Factor on an estimate from a sample."""
_WORKERS = 8


@dataclass
class Album:
    """Embedded images of the pairs of a page; `show` gives each in full once, and later a reference to that place."""

    prefix: str
    """Start of the anchors of images."""
    size: Size
    images: dict[Path, dict[str, Any]]
    further: int
    """Number of pairs of further seeds that it holds."""
    further_left_out: int = 0
    main_left_out: int = 0
    _places: dict[Path, str] = field(default_factory=dict)

    def show(self, path: Path | None) -> dict[str, Any] | None:
        """Values of the template's `image`; None: no image was saved, or there was no room for it."""
        if path is None or path not in self.images:
            return None
        # An image that the page asks a server for needs no copy: the browser keeps it.
        if path in self._places and self.images[path]["src"].startswith("data:"):
            return {"again": self._places[path]}
        self._places[path] = f"{self.prefix}-i{len(self._places)}"
        return self.images[path] | {"id": self._places[path]}

    def described(self) -> str:
        """What was done to the images to keep the page small; "": nothing."""
        parts, size = [], self.size
        if any(image["link"] for image in self.images.values()):
            further = f", those of further seeds of {size.further_px}" if self.further else ""
            parts.append(
                f"Images on this page are WebP of at most {size.main_px} pixels a side{further}, quality "
                f"{size.quality}; where the run folder is at hand, the enlarged view links to its files."
            )
        if self.further_left_out:
            parts.append(f"{self.further_left_out} pairs of further seeds are in the run folder alone.")
        if self.main_left_out:
            parts.append(f"{self.main_left_out} more pairs have no room here; their images are in the run folder.")
        return " ".join(parts)

    def __contains__(self, path: Path | None) -> bool:
        return path in self.images


def fill(main: Sequence[Files], further: Sequence[Files], room: int, prefix: str, place: Place) -> Album:
    """The best of `SIZES` with which all images fit into `room`, and the images at that size.

    `main` are pairs to be shown first, without repeats, the most important first, `further` those of other seeds, none
    of `main`. `room`: bytes of the page for them; `prefix`: start of the anchors of images.

    Raises ConfigError: a file is not an image.
    """
    with ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as pool:

        def embedded(pairs: Sequence[Files], limit_px: int, quality: int) -> Iterator[dict[str, Any]]:
            files = [file for pair in pairs for file in pair] if limit_px else []
            return pool.map(lambda file: place.image(file, limit_px, quality=quality) or {}, files)

        def expected(size: Size) -> float:
            total = 0.0
            for pairs, limit_px in ((main, size.main_px), (further, size.further_px)):
                sample = pairs[:: max(1, len(pairs) // _SAMPLED)]
                drawn = sum(len(image["src"]) for image in embedded(sample, limit_px, size.quality))
                total += drawn * len(pairs) / max(len(sample), 1) * (_SLACK if len(sample) < len(pairs) else 1)
            return total

        first = bisect.bisect_left(range(len(SIZES) - 1), True, key=lambda i: expected(SIZES[i]) <= room)
        for size in SIZES[first:]:
            shown = [*main, *(further if size.further_px else ())]
            found = [*embedded(main, size.main_px, size.quality), *embedded(further, size.further_px, size.quality)]
            images = dict(zip(itertools.chain.from_iterable(shown), found, strict=True))
            if sum(len(image["src"]) for image in found) <= room:
                held = len(shown) - len(main)
                return Album(prefix, size, images, held, len(further) - held)
        # As many of the first pairs, at the smallest size, as there is room for.
        ends = list(itertools.accumulate(sum(len(images[file]["src"]) for file in pair) for pair in main))
        count = bisect.bisect_right(ends, room)
        kept = {file: images[file] for pair in main[:count] for file in pair}
        return Album(prefix, SIZES[-1], kept, 0, len(further), len(main) - count)
