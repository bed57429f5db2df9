"""Single pictures with a label, from pairs: what Diffusion-KTO trains on (arXiv 2404.04465)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.core.console import log
from flowrl.core.errors import ConfigError
from flowrl.data.preference_records import StoredImage
from flowrl.data.preferences import PreferenceSet, require_same
from flowrl.data.prompts import Prompt

Mixed = Literal["positive", "negative", "drop"]
"""What a picture counts as that won one pair and lost another."""
POSITIVE_SHARE = 0.8
"""Of the draws, as released: jacklishufan/diffusion-kto:train_kto_sd_v1.5.py."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A picture and whether it is one to draw."""

    prompt: Prompt
    image: StoredImage
    label: int
    """+1 or -1."""
    key: str
    """Of the record that it is read from, and its side there."""


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """Every picture of a preference set once for each of its captions, numbered 0 .. M-1."""

    pairs: PreferenceSet
    entries: np.ndarray
    """Twice the index of the first pair it stands in, plus 1 if it lost there, rising, [M] int64."""
    labels: np.ndarray
    """+1 or -1, [M] int8."""
    counts: dict[str, int]
    """Pictures that only won, only lost, and did both."""

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, number: int) -> Labelled:
        """
        Raises:
            Unreadable: the row holds no picture, or the source has changed since it was scanned.
        """
        index, lost = divmod(int(self.entries[number]), 2)
        pair = self.pairs.read(index)
        image = pair.rejected if lost else pair.chosen
        assert image is not None
        side = "rejected" if lost else "chosen"
        return Labelled(pair.prompt, image, int(self.labels[number]), f"{pair.key}, {side}")


def labelled(pairs: PreferenceSet, mixed: Mixed = "positive") -> LabelledSet:
    """The pictures of a set by what became of them under one caption.

    A picture is known by the name that the set gives it (Pick-a-Pic's `image_0_uid`), by its path, or by the hash of
    its bytes; the last means reading the whole set once. About 250 bytes of memory a picture, in this pass only.

    Args:
        pairs: winners only are positive.
        mixed: of pictures that both won and lost; "positive" is the published `gt_label_wi_l`.

    Raises:
        ConfigError: one of the two classes is empty.
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
            raise ConfigError(f"{where}: no picture is {name} (pictures: {counts}, those that did both: {mixed})")
    log.info("%s: pictures by what became of them: %s; those that did both: %s", where, counts, mixed)
    kept = labels != 0
    order = np.argsort(entries[kept])
    return LabelledSet(pairs, entries[kept][order], labels[kept][order], counts)


class LabelledSource:
    """An endless, seeded order with a fixed share of positive pictures in every stretch of it.

    Place n is positive where floor(n share) grows, so the share holds for any batch within one picture. Either class
    has its own epochs. The draw of an iteration depends on (seed, iteration) and the set alone.
    """

    def __init__(
        self, images: LabelledSet, per_iteration: int, seed: int, positive_share: float = POSITIVE_SHARE
    ) -> None:
        if not 0 < positive_share < 1:
            raise ValueError(f"positive_share={positive_share}: give a share between 0 and 1, both excluded")
        self.images, self.per_iteration, self.seed, self.share = images, per_iteration, seed, positive_share
        self.classes = {sign: np.flatnonzero(images.labels == sign) for sign in (1, -1)}
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        """Class -> its last epoch asked for, and the order there."""

    def draw(self, iteration: int) -> list[int]:
        """Numbers of the pictures of an iteration, counted from 1."""
        start = (iteration - 1) * self.per_iteration
        return [self._at(place) for place in range(start, start + self.per_iteration)]

    def _at(self, place: int) -> int:
        # Rounding must not eat a positive: 0.57 * 100 is 56.99...
        before, after = (math.floor(n * self.share + 1e-9) for n in (place, place + 1))
        sign, turn = (1, before) if after > before else (-1, place - before)
        epoch, inside = divmod(turn, len(self.classes[sign]))
        if self._orders.get(sign, (None,))[0] != epoch:
            self._orders[sign] = epoch, self._order(sign, epoch)
        return int(self._orders[sign][1][inside])

    def _order(self, sign: int, epoch: int) -> np.ndarray:
        """The class in the order of its pairs, which lie close together where that is cheap to read."""
        numbers = self.classes[sign]
        purpose = f"labelled/{'positive' if sign > 0 else 'negative'}"
        return numbers[self.images.pairs.arrange(self.images.entries[numbers] // 2, self.seed, purpose, epoch)]

    def state_dict(self) -> dict[str, object]:
        return {"fingerprint": self.images.pairs.fingerprint, "count": len(self.images)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """
        Raises:
            ConfigError: the set is not the one that the checkpoint was trained on.
        """
        require_same(self.images.pairs.report.where, state, self.state_dict())
