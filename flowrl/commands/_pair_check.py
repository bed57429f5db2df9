"""`flowrl pairs --check`: a preference set as training would see it, with every image or video opened."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.data.preferences import PreferenceSet


@dataclass
class Look:
    """Counts after every image was opened."""

    pairs: int = 0
    """Records with all their images readable: a winner alone, or both."""
    alone: int = 0
    """Records without a loser, of these."""
    winners: int = 0
    """Records with a readable winner."""
    broken: int = 0
    """Records with an unreadable image."""
    unreadable: list[str] = field(default_factory=list)
    """The first few unreadable images."""
    equal: int = 0
    """Records of two images with the same bytes."""
    alike: list[str] = field(default_factory=list)
    """The first few of those."""
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """(width, height) of the images, in pixels."""
    frames: set[int] = field(default_factory=set)
    """Numbers of frames of the images (1) and videos."""


def look(source: str, words: Sequence[str]) -> bool:
    """Print what the set holds; True if a training would take it: one on pairs, or on winners if there are no pairs.

    Raises ConfigError: no such set or column, or nothing in it can be used.
    """
    from flowrl.core.strict import overridden, validate
    from flowrl.data.options import PreferenceOptions
    from flowrl.data.preferences import load_preferences
    from flowrl.data.stored_videos import Frames
    from flowrl.display.console import set_up_logging

    options = validate(PreferenceOptions, overridden({}, words), "")
    set_up_logging(None, main=True)
    # The whole set is read before the verdict, whatever its share of broken records.
    every = dataclasses.replace(options, max_broken=1.0)
    pairs = load_preferences(source, "SOURCE", every, paired=False, videos=Frames(None))
    result = _opened(pairs)
    extremes = [pick(result.sizes or [(0, 0)], key=lambda size: size[0] * size[1]) for pick in (min, max)]
    small, large = (f"{width}x{height}" for width, height in extremes)
    sizes = "no size" if not result.sizes else small if small == large else f"{small} to {large} pixels"
    few, many = min(result.frames, default=1), max(result.frames, default=1)
    kind = f"videos of {few} frames" if few == many else f"videos of {few} to {many} frames"
    kind = "images" if many == 1 else kind
    print(f"{result.pairs} of {len(pairs)} records have readable {kind}, of {sizes}")
    print(f"{sum(1 for _ in pairs.captions())} distinct prompts")
    for count, shown, what in (
        (result.broken, result.unreadable, "records with an image that cannot be read"),
        (result.equal, result.alike, "records of two equal images"),
    ):
        if count:
            print(f"{count} {what}: {'; '.join(shown)}{' ...' if count > len(shown) else ''}")
    rows, left_out = pairs.report.rows, pairs.report.broken
    paired = _verdict("methods on pairs", result.pairs - result.alone, left_out, len(pairs), rows, options.max_broken)
    alone = _verdict("methods on winners alone", result.winners, left_out, len(pairs), rows, options.max_broken)
    return alone if pairs.report.winners_only == len(pairs) else paired


def _verdict(who: str, good: int, left_out: int, usable: int, rows: int, allowed: float) -> bool:
    """Print whether `good` of `usable` records are enough for a kind of method; True if they are."""
    share = (left_out + usable - good) / rows
    enough = good > 0 and share <= allowed
    verdict = "ok" if enough else "too much" if good else "nothing to use"
    print(f"{who}: broken {share:.2%} of {rows} records, max_broken={allowed}: {verdict}")
    return enough


def _opened(pairs: "PreferenceSet") -> Look:
    from flowrl.data.preference_records import EXAMPLES, Unreadable
    from flowrl.data.stored_videos import may_be_video
    from flowrl.display.display import Progress

    result, bar = Look(), Progress(len(pairs), "opening", show=True)
    for index in range(len(pairs)):
        try:
            pair = pairs.read(index)
            for count, image in enumerate(filter(None, (pair.chosen, pair.rejected))):
                frames = image.frames(None) if may_be_video(image.source) else [image.open()]
                result.sizes.add(frames[0].size)
                result.frames.add(len(frames))
                result.winners += count == 0
        except Unreadable as error:
            result.broken += 1
            result.unreadable += [str(error)] if len(result.unreadable) < EXAMPLES else []
        else:
            result.pairs += 1
            result.alone += pair.rejected is None
            if pair.rejected is not None and pair.chosen.content() == pair.rejected.content():
                result.equal += 1
                result.alike += [pair.key] if len(result.alike) < EXAMPLES else []
        bar.update(1)
    bar.close()
    return result
