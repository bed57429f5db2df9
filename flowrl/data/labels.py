"""Single labelled images made of pairs, for Diffusion-KTO (arXiv 2404.04465)."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.data.preference_records import StoredImage
from flowrl.data.preferences import PreferenceSet, PreferenceSource
from flowrl.data.prompts import Prompt
from flowrl.display.console import log

Mixed = Literal["positive", "negative", "drop"]
"""Label of an image that won one pair and lost another; "drop": it is left out."""
POSITIVE_SHARE = 0.8
"""Share of positive images in the draws of the released code: jacklishufan/diffusion-kto:train_kto_sd_v1.5.py."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """An image with its label."""

    prompt: Prompt
    image: StoredImage
    label: int
    """+1: an image to make more likely, -1: less likely."""
    key: str
    """Key of its record, and its side there."""


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """Every image of a preference set once for each of its captions, numbered 0 .. M-1."""

    pairs: PreferenceSet
    entries: np.ndarray
    """Twice the index of an image's first pair, plus 1 if it lost there, ascending, [M] int64."""
    labels: np.ndarray
    """+1 or -1, [M] int8."""
    counts: dict[str, int]
    """Numbers of images that only won, only lost, and did both."""

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, number: int) -> Labelled:
        """An image, not opened; raises as `PreferenceSet.read` does."""
        index, lost = divmod(int(self.entries[number]), 2)
        pair = self.pairs.read(index)
        image = pair.rejected if lost else pair.chosen
        assert image is not None
        side = "rejected" if lost else "chosen"
        return Labelled(pair.prompt, image, int(self.labels[number]), f"{pair.key}, {side}")


def labelled(pairs: PreferenceSet, mixed: Mixed = "positive") -> LabelledSet:
    """The images of a set, labelled by the outcomes of their pairs under one caption.

    An image is identified by its name in the set (Pick-a-Pic's `image_0_uid`), its path, or the hash of its bytes, for
    which the whole set is read once. Takes about 250 bytes of memory per image in this pass. Winners without a loser
    are positive. `mixed`: label of images that both won and lost; "positive" is the published `gt_label_wi_l`.

    Raises ConfigError: one of the two classes is empty.
    """
    first: dict[bytes, int] = {}
    fate: dict[bytes, int] = {}
    for index, text, keys in pairs.identities():
        for lost, key in enumerate(keys):
            name = hashlib.sha256(f"{text}\0{key}".encode("utf-8", "surrogatepass")).digest()[:16]
            first.setdefault(name, 2 * index + lost)
            fate[name] = fate.get(name, 0) | (2 if lost else 1)
    entries = np.fromiter(first.values(), dtype=np.int64, count=len(first))
    fates = np.fromiter((fate[name] for name in first), dtype=np.int8, count=len(first))
    signs = np.array([0, 1, -1, {"positive": 1, "negative": -1, "drop": 0}[mixed]], dtype=np.int8)
    labels = signs[fates]
    counts = {name: int((fates == k).sum()) for k, name in enumerate(("won", "lost", "both"), 1)}
    where = pairs.report.where
    for sign, name in ((1, "positive"), (-1, "negative")):
        if not (labels == sign).any():
            raise ConfigError(f"{where}: no image is {name} (images: {counts}, those that did both: {mixed})")
    log.info("%s: images by the outcomes of their pairs: %s; those that did both: %s", where, counts, mixed)
    kept = labels != 0
    order = np.argsort(entries[kept])
    return LabelledSet(pairs, entries[kept][order], labels[kept][order], counts)


class LabelledSource(PreferenceSource):
    """An endless, seeded order over labelled images with a fixed share of positive ones in every part of it.

    Position n is positive if floor(n share) grows there, so the share holds in any batch within one image. Each class
    has its own epochs.
    """

    def __init__(
        self, images: LabelledSet, per_iteration: int, seed: int, positive_share: float = POSITIVE_SHARE
    ) -> None:
        if not 0 < positive_share < 1:
            raise ValueError(f"positive_share={positive_share}: give a share between 0 and 1, both excluded")
        super().__init__(images.pairs, per_iteration, seed)
        self.images, self.share = images, positive_share
        self.classes = {sign: np.flatnonzero(images.labels == sign) for sign in (1, -1)}
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        """Class -> (its last epoch asked for, the order in it)."""

    def _at(self, place: int) -> int:
        # Against rounding: 0.57 * 100 is 56.99...
        before, after = (math.floor(n * self.share + 1e-9) for n in (place, place + 1))
        sign, turn = (1, before) if after > before else (-1, place - before)
        epoch, inside = divmod(turn, len(self.classes[sign]))
        if self._orders.get(sign, (None,))[0] != epoch:
            numbers, purpose = self.classes[sign], f"labelled/{'positive' if sign > 0 else 'negative'}"
            # Images that are cheap to read together stay close.
            order = self.pairs.arrange(self.images.entries[numbers] // 2, self.seed, purpose, epoch)
            self._orders[sign] = epoch, numbers[order]
        return int(self._orders[sign][1][inside])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": len(self.images)}
