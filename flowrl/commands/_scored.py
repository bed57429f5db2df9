"""Images and videos of files, or of a preference set, through rewards: `flowrl score`."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError
from flowrl.media import media

if TYPE_CHECKING:
    import torch

    from flowrl.data.preference_records import StoredImage
    from flowrl.scoring.scorer import Scorer

Sample = tuple["Path | StoredImage", str, dict[str, Any]]
"""Image or video, prompt and metadata."""


def warn(text: str) -> None:
    """A line for people, beside the lines of JSON."""
    print(text, file=sys.stderr)


def scored(scorer: Scorer, batches: Iterable[Sequence[Sample]]) -> Iterator[tuple[Sample, dict[str, float | None]]]:
    """Each sample in order with its value of each output; None where it cannot be read or was not scored.

    While a batch is read, rewards that overlap score the one before.
    """
    import torch

    from flowrl.scoring.overlap import Beside
    from flowrl.scoring.surroundings import Batch

    def values(key: tuple[Sequence[Sample], list[int]], raw: dict[str, torch.Tensor]) -> Iterator[Any]:
        rows = {place: row for row, place in enumerate(key[1])}
        for place, sample in enumerate(key[0]):
            found = {name: float(raw[name][rows[place]]) if place in rows else math.nan for name in scorer.outputs}
            yield sample, {name: None if math.isnan(value) else value for name, value in found.items()}

    with Beside(scorer, torch.device("cuda" if torch.cuda.is_available() else "cpu")) as beside:
        for batch in batches:
            for samples, rows, images in _opened(scorer, batch):
                kept = [samples[place] for place in rows]
                texts, metadata = [text for _, text, _ in kept], [record for _, _, record in kept]
                for key, scores in beside.add((samples, rows), Batch(images, texts, metadata)):
                    yield from values(key, scores.raw)
        for key, scores in beside.rest():
            yield from values(key, scores.raw)


def _opened(scorer: Scorer, samples: Sequence[Sample]) -> Iterator[tuple[Sequence[Sample], list[int], Any]]:
    """(samples, positions of those that could be read, their images) of a batch, in 8 bits where they are of one size.

    Videos of several sizes are handed on size by size, unless a reward needs the whole batch: as floats, which images
    of several sizes are, they would be four times as large.
    """
    import torch

    from flowrl.media.eight_bits import EightBitImages, unit_floats
    from flowrl.scoring.build import require_modality

    read: list[torch.Tensor | None] = []
    for file, _, _ in samples:
        try:
            read.append(levels(file))
        except ConfigError as error:
            warn(str(error))
            read.append(None)
    pairs = zip(samples, read, strict=True)
    kinds = {own.ndim == 4: _name(file) for (file, _, _), own in pairs if own is not None}
    for entry in scorer.distinct:
        for videos, name in kinds.items():
            require_modality(entry.name, entry.reward.card, videos=videos, file=name)
    whole = True not in kinds or any(entry.reward.card.needs_groups for entry in scorer.distinct)
    ends = [] if whole else _changes([None if own is None else own.shape for own in read])
    for start, stop in itertools.pairwise([0, *ends, len(samples)]):
        rows = [place for place in range(start, stop) if read[place] is not None]
        images = [own for own in read[start:stop] if own is not None]
        handed: Any
        if len({image.shape for image in images}) == 1:
            handed = EightBitImages(torch.stack(images), torch.ones(len(images), dtype=torch.bool))
        else:
            handed = [unit_floats(image) for image in images]
        yield samples[start:stop], [place - start for place in rows], handed
        read[start:stop] = [None] * (stop - start)


def _changes(shapes: Sequence[Any]) -> list[int]:
    """Positions where another shape begins; None has none.

    >>> _changes([None, 1, 1, None, 2, None, 1])
    [4, 6]
    """
    result, now = list[int](), None
    for place, shape in enumerate(shapes):
        if shape is not None and shape != now:
            result += [] if now is None else [place]
            now = shape
    return result


def levels(image: Path | StoredImage) -> torch.Tensor:
    """An image [3, H, W] or video [F, 3, H, W], uint8. Raises ConfigError: it cannot be read."""
    import torch

    from flowrl.data.preference_records import Unreadable
    from flowrl.media.eight_bits import eight_bit

    file = image if isinstance(image, Path) else image.source
    try:
        if isinstance(file, Path) and file.is_file():
            return media.read_levels(file)
        assert not isinstance(image, Path)
        if isinstance(file, Path):  # a folder of frames
            return eight_bit(torch.stack([media.pixels(frame) for frame in image.frames(None)]))
        return eight_bit(media.pixels(image.open()))
    except Unreadable as error:
        raise ConfigError(str(error)) from error
    except media.UNREADABLE as error:
        raise ConfigError(f"{_name(image)} cannot be read: {error}") from error


def _name(image: Path | StoredImage) -> str:
    """An image in messages."""
    return image.name if isinstance(image, Path) else image.where


def rated(image: Path | StoredImage, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the frame rate of its video, for rewards that count in seconds; a given one stays.

    Raises ConfigError: a file that needs the extra `video`, which is not installed.
    """
    file = image if isinstance(image, Path) else image.source
    if not isinstance(file, Path) or file.is_dir():
        return record
    if not media.is_video_file(file) and file.suffix.lower() not in media.MAY_MOVE:
        return record
    try:
        fps = media.facts(file)[1]
    except ConfigError:
        raise
    except media.UNREADABLE:
        # It is reported when it is opened, and is null. Without a rate, a reward that needs one would refuse all files.
        fps = math.nan
    return record if fps is None else {"fps": fps, **record}
