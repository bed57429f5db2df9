"""`flowrl pairs --check`: a preference set as training would see it, with every image, video and source opened."""

import dataclasses
import hashlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrl.data.preference_records import Preference, Report, StoredImage, Unreadable

if TYPE_CHECKING:
    from flowrl.data.preferences import PreferenceSet

KINDS = ("images", "videos")
UNREADABLE = "records with an image that cannot be read"
Opened = tuple[tuple[int, int], int] | Unreadable
"""((width, height), number of frames) of an image or a video, or why it cannot be read."""
Seen = tuple[Preference, list[Opened], bool] | Unreadable
"""A record, what its winner and its loser are, and whether they have the same bytes; or why it cannot be read."""


@dataclass
class Look:
    """Counts after every image was opened."""

    pairs: Counter[str] = field(default_factory=Counter)
    """Records of each of `KINDS` with all their images readable: a winner alone, or both."""
    alone: Counter[str] = field(default_factory=Counter)
    """Records without a loser, of these."""
    winners: Counter[str] = field(default_factory=Counter)
    """Records with a readable winner."""
    wrong: Report = field(default_factory=lambda: Report(""))
    """Counts and examples of what is wrong with others."""
    firsts: dict[str, str] = field(default_factory=dict)
    """The first record of each kind."""
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """(width, height) of the images, in pixels."""
    frames: set[int] = field(default_factory=set)
    """Numbers of frames of the images (1) and videos."""
    prompts: set[bytes] = field(default_factory=set)
    """Hashes of the distinct prompts with their sources."""

    def add(self, seen: Seen) -> None:
        if isinstance(seen, Unreadable):
            self.wrong.skip(UNREADABLE, str(seen))
            return
        pair, opened, same = seen
        asked = repr((pair.prompt.text, pair.prompt.images)).encode("utf-8", "surrogatepass")
        self.prompts.add(hashlib.sha256(asked).digest()[:16])
        readable = [one for one in opened if not isinstance(one, Unreadable)]
        self.sizes |= {size for size, _ in readable}
        self.frames |= {frames for _, frames in readable}
        kinds = {KINDS[frames > 1] for _, frames in readable}
        if len(kinds) > 1:
            self.wrong.skip("records of an image and a video", pair.key)
            return
        kind = next(iter(kinds), KINDS[0])
        if kinds:
            self.firsts.setdefault(kind, pair.key)
        self.winners[kind] += not isinstance(opened[0], Unreadable)
        if len(readable) < len(opened):
            self.wrong.skip(UNREADABLE, next(str(one) for one in opened if isinstance(one, Unreadable)))
            return
        self.pairs[kind] += 1
        self.alone[kind] += pair.rejected is None
        if same:
            self.wrong.skip("records of two equal images", pair.key)


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
    print(f"{result.pairs.total()} of {len(pairs)} records have readable {kind}, of {sizes}")
    print(f"{len(result.prompts)} distinct prompts")
    for what, count in result.wrong.counts.items():
        shown = result.wrong.examples[what]
        print(f"{count} {what}: {'; '.join(shown)}{' ...' if count > len(shown) else ''}")
    # A model takes one kind.
    (most, winners), *others = result.winners.most_common() or [(KINDS[0], 0)]
    if any(count for _, count in others):
        parts = (f"{count} of {kind}, the first {result.firsts[kind]}" for kind, count in result.winners.items())
        print(f"images and videos in one set, the fewer count as broken: {'; '.join(parts)}")
    rows, left_out = pairs.report.rows, pairs.report.broken
    good = result.pairs[most] - result.alone[most]
    paired = _verdict("methods on pairs", good, left_out, len(pairs), rows, options.max_broken)
    alone = _verdict("methods on winners alone", winners, left_out, len(pairs), rows, options.max_broken)
    return alone if pairs.report.winners_only == len(pairs) else paired


def _verdict(who: str, good: int, left_out: int, usable: int, rows: int, allowed: float) -> bool:
    """Print whether `good` of `usable` records are enough for a kind of method; True if they are."""
    share = (left_out + usable - good) / rows
    enough = good > 0 and share <= allowed
    verdict = "ok" if enough else "too much" if good else "nothing to use"
    print(f"{who}: broken {share:.2%} of {rows} records, max_broken={allowed}: {verdict}")
    return enough


def _opened(pairs: "PreferenceSet") -> Look:
    from flowrl.display.display import Progress

    result, bar = Look(), Progress(len(pairs), "opening", show=True)
    for seen in _every(pairs):
        result.add(seen)
        bar.update(1)
    bar.close()
    return result


def _every(pairs: "PreferenceSet") -> Iterator[Seen]:
    """Every record in order, a few at once.

    Decoders run beside each other, a thread a core; this one reads the records, and opens the sources that are new.
    """
    threads = os.cpu_count() or 1
    waiting: deque[Future[Seen]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for index in range(len(pairs)):
            try:
                read: Preference | Unreadable = pairs.read(index)
            except Unreadable as error:
                read = error
            waiting.append(pool.submit(_seen, read))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def _seen(pair: Preference | Unreadable) -> Seen:
    if isinstance(pair, Unreadable):
        return pair
    images = [image for image in (pair.chosen, pair.rejected) if image is not None]
    opened = [_look_at(image) for image in images]
    return pair, opened, len(set(opened)) < len(images) and images[0].content() == images[1].content()


def _look_at(image: StoredImage) -> Opened:
    from flowrl.data.stored_videos import may_be_video

    try:
        if not may_be_video(image.source):
            return image.size(), 1
        frames = image.frames(None)
    except Unreadable as error:
        return error
    return frames[0].size, len(frames)
