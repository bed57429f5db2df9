"""What stands beside a win rate: how much the trained model's images differ from the base's, and what counts as a tie.

Most changes of a score are no success if nobody can see them, so each place that prints a win rate prints both
sentences: the terminal, the report, the comparison of runs, the model card, the table of a suite, the votes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.files import is_mapping
from flowrl.media import media
from flowrl.statistics.paired import TIE

HALF_LEVEL = 0.5
"""Mean difference of 8-bit images in levels: less than rounding hides."""
MOST = 64
"""Pairs of images that are opened: `eval.save_images` saves those of 64 prompts, and more take seconds."""
_MOST_VIDEOS = 8

Pairs = Iterable[tuple[Path, Path]]
"""Files of base and trained model, of the same prompt and noise."""


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the trained model's images are from the base's on the same noise."""

    levels: float
    """Mean absolute difference of the brightness, in levels of 255."""
    pairs: int
    """Number of the saved pairs that it is the mean of."""
    noun: str = "image"
    """"image" or "video"."""

    @property
    def hardly(self) -> bool:
        return self.levels < HALF_LEVEL


def saved_pairs(before: Path, after: Path, prompts: Iterable[int]) -> Iterator[tuple[Path, Path]]:
    """Files of the first seed of these prompts, in the folders of two evaluations; those that both have."""
    for prompt in prompts:
        one, other = (media.find(folder / f"{prompt:05d}-0") for folder in (before, after))
        if one is not None and other is not None and one.suffix == other.suffix:
            yield one, other


def brightness(file: Path) -> np.ndarray:
    """Brightness of an image's or video's frames, [F, H, W] float64 0 to 255. Raises media.UNREADABLE."""
    return np.stack([np.asarray(frame.convert("L"), dtype=np.float64) for frame in media.read_frames(file)])


def bright_pairs(pairs: Pairs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`brightness` of the first pairs of equal size that can be read, [F, H, W] each."""
    given = 0
    for one, other in pairs:
        try:
            before, after = brightness(one), brightness(other)
        except media.UNREADABLE:  # as after a kill; the others are enough
            continue
        if before.shape == after.shape:
            yield before, after
            given += 1
        if given == (MOST if one.suffix == ".png" else _MOST_VIDEOS):
            return


def measure(pairs: Pairs) -> Moved | None:
    """How far the trained model's images are from the base's; None: no pair is saved."""
    kinds = set[str]()

    def noted() -> Iterator[tuple[Path, Path]]:
        for pair in pairs:
            kinds.add(pair[0].suffix)
            yield pair

    levels = [float(np.abs(after - before).mean()) for before, after in bright_pairs(noted())]
    if not levels:
        return None
    return Moved(float(np.mean(levels)), len(levels), "image" if kinds == {".png"} else "video")


def trained(config: Mapping[str, Any]) -> str:
    """What a run's configuration trains, as the subject of a sentence."""
    method, model = (part if is_mapping(part := config.get(key)) else {} for key in ("algorithm", "model"))
    if method.get("name") == "find":
        return "initial noise"
    return "weights" if model.get("lora") is None else "LoRA"


def sentence(found: Moved | None, what: str = "model") -> str:
    """How much the images change, in a sentence; `what` as of `trained`."""
    if found is None:
        return "How far samples are from the base's is not known: none of the same prompt and seed is saved for both."
    on = "with the same seeds" if what == "initial noise" else "on the same noise"
    said = f"the {found.noun}s differ from the base's by {found.levels:.3g} of 255 levels."
    if not found.hardly:
        return f"{on[:1].upper()}{on[1:]} {said}"
    return f"The {what} hardly {'move' if what == 'weights' else 'moves'}: {on} {said}"


def rule(value: Mapping[str, Any], noun: str = "image") -> str:
    """What a win rate, an entry of `summary.json`, counts as a tie, in words; `noun` is "image" or "video"."""
    margin = value["margin"]
    apart = f"scores at most {margin:.3g} apart, {value['tie']:g} of the base's std"
    scores = "equal scores" if margin <= TIE else apart
    return f"a tie: {scores}, or {noun}s that are equal in 8 bits"
