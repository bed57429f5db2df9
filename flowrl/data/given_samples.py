"""Given pictures: which of them an iteration draws, and how their latents come to stand in its slots.

A pair is a prompt slot of two samples, the chosen picture with reward 1 and the rejected one with reward 0. A winner,
or a single picture with a label, is a slot of one. What a run's `Rollout` holds is then the same whether its samples
were drawn or given, and everything behind it knows no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.console import log
from flowrl.core.contents import Input, set_of
from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.media import fitted, pixels
from flowrl.core.rng import normal, permutation, stream
from flowrl.core.types import Member, SampleId
from flowrl.data.labels import Labelled, LabelledSet, LabelledSource, labelled
from flowrl.data.options import PairsConfig
from flowrl.data.preference_records import Preference, StoredImage, Unreadable
from flowrl.data.preferences import PreferenceSet, PreferenceSource, load_preferences
from flowrl.models.base import ModelAdapter

PAIR: tuple[Member, ...] = ("chosen", "rejected")
HELD_OUT = 500
"""Held-out pairs that are looked at unless `data.pairs.max_eval` says otherwise."""


class TooManyLost(ConfigError):
    """Training meets more unreadable pictures than allowed: raised on all processes alike, between two updates."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What stands in a slot."""

    text: str
    images: tuple[StoredImage | None, ...]
    """None: the network draws it, or the record cannot be read."""
    rewards: tuple[float, ...]
    """1 or 0 of each sample; NaN where the record cannot be read."""


@dataclass(frozen=True, slots=True)
class Latents:
    """Of B samples in the slots of an iteration."""

    x0: Tensor
    """[B, ...] float32 on the CPU; zeros where the network is to draw, or a picture cannot be read."""
    rewards: Tensor
    """[B] float32, NaN where a picture cannot be read."""
    texts: dict[int, str]
    """Caption of each of their slots."""


@dataclass(frozen=True, slots=True)
class Look:
    """How the pictures of an iteration are looked at; both of a pair alike, so that equal pictures stay equal."""

    options: PairsConfig
    seed: int
    iteration: int

    def place(self, slot: int) -> tuple[tuple[float, float], bool]:
        """(place of the part that is taken, whether it is mirrored)."""
        across, down, coin = stream(self.seed, "look", self.iteration, slot).random(3).tolist()
        return ((down, across) if self.options.crop == "random" else (0.5, 0.5)), self.options.flip and coin < 0.5

    def caption(self, slot: int, text: str) -> str:
        """The caption, or the empty one where it is dropped."""
        dropped = stream(self.seed, "caption_dropout", self.iteration, slot).random() < self.options.caption_dropout
        return "" if dropped else text

    def posterior(self, shape: Sequence[int], slots: Sequence[int]) -> Tensor | None:
        """Noise of the VAE's draw for one picture of each slot, [len(slots), *shape]; None takes the mean."""
        if self.options.posterior == "mean":
            return None
        return normal(shape, self.seed, "posterior", [(self.iteration, slot) for slot in slots])


class Given:
    """The pictures that a run learns from, and those that are held out.

    Args:
        options: name the sets.
        algorithm: says who stands in a slot, and of single pictures how they are drawn.
        seed: of the order.

    Raises:
        ConfigError: a set that cannot be used.
    """

    def __init__(self, options: PairsConfig, algorithm: Any, seed: int) -> None:
        self.options, self.members, self.seed = options, tuple(algorithm.members), seed
        paired = "rejected" in self.members
        self.pairs = load_preferences(options.path, "data.pairs.path", options.records, paired=paired)
        self.records: PreferenceSet | LabelledSet = self.pairs
        self.source: PreferenceSource | LabelledSource
        if "labelled" in self.members:
            self.records = labelled(self.pairs, algorithm.config.mixed)
            share = algorithm.config.liked_share
            self.source = LabelledSource(self.records, options.per_iteration, seed, share)
        else:
            self.source = PreferenceSource(self.pairs, options.per_iteration, seed)
        self.asked = self.lost = 0
        """Slots of this call of the program so far, and those of them with a picture that cannot be read."""
        self.held_out: PreferenceSet | None = None
        if options.eval is not None:
            self.held_out = load_preferences(options.eval, "data.pairs.eval", options.records)

    @property
    def held_out_numbers(self) -> list[int]:
        """Held-out pairs that are looked at: a random part of them, in the set's order, since sets are often sorted."""
        count = 0 if self.held_out is None else len(self.held_out)
        most = HELD_OUT if self.options.max_eval is None else self.options.max_eval
        return sorted(permutation(count, self.seed, "held_out").tolist()[:most])

    def captions(self) -> list[str]:
        """Every text that conditions a forward, the empty one among them, for a cache of their embeddings."""
        own = list(self.pairs.captions())
        return ["", *own, *(() if self.held_out is None else self.held_out.captions())]

    def facts(self) -> dict[str, Any]:
        """What the sets hold and what was left out of them, for provenance.json."""
        result = {"pairs": self.pairs.report.facts()}
        if isinstance(self.records, LabelledSet):
            result["pairs"]["pictures"] = self.records.counts
        return result if self.held_out is None else result | {"eval_pairs": self.held_out.report.facts()}

    def contents(self) -> list[Input]:
        """What the sets hold: what their scans found, with names and sizes of their files; no picture is read."""
        result = []
        for key, source, pairs in (
            ("data.pairs.path", self.options.path, self.pairs),
            ("data.pairs.eval", self.options.eval, self.held_out),
        ):
            if pairs is not None:
                scanned = {"scan": pairs.fingerprint, "files": pairs.report.files()}
                result.append(set_of(key, str(source), f"{len(pairs)} records", scanned))
        return result

    def require_readable(self, lost: int, count: int) -> None:
        """Count an iteration's slots, `lost` of `count` without a readable picture, and judge all so far.

        With p = max_broken they stop the run where, of all n slots that this call of the program has drawn,

            lost > p n + 4 sqrt(p (1 - p) n) + 1

        A sample of a set at its limit exceeds p n every other time, and this about once in 30,000.

        Raises:
            TooManyLost: too many have a picture that cannot be read.
        """
        self.lost, self.asked = self.lost + lost, self.asked + count
        share = self.options.records.max_broken
        if self.lost > share * self.asked + 4 * math.sqrt(share * (1 - share) * self.asked) + 1:
            raise TooManyLost(
                f"data.pairs.path={self.options.path!r}: {self.lost} of {self.asked} pairs drawn so far have a picture "
                f"that cannot be read, more than data.pairs.records.max_broken={share} explains; mend the pictures "
                "(the warnings name them), or raise it, and go on with --resume"
            )


def slot_of(records: PreferenceSet | LabelledSet, number: int, members: Sequence[Member]) -> Slot:
    """A record as what stands in a slot."""
    try:
        record = records.read(number)
    except Unreadable as error:
        log.warning("%s", error)
        return Slot("", (None,) * len(members), (math.nan,) * len(members))
    if isinstance(record, Labelled):
        return Slot(record.prompt.text, (record.image,), ((record.label + 1) / 2,))
    return Slot(record.prompt.text, tuple(_image(record, m) for m in members), tuple(map(_reward, members)))


def _image(record: Preference, member: Member) -> StoredImage | None:
    return {"chosen": record.chosen, "rejected": record.rejected}.get(member)


def _reward(member: Member) -> float:
    return 1.0 if member == "chosen" else 0.0


def latents_of(
    read: Callable[[int], Slot],
    ids: Sequence[SampleId],
    adapter: Any,
    *,
    batch_size: int,
    look: Look | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Latents:
    """Open the pictures of B samples, bring them to the model's size, and encode them, some at a time.

    Args:
        read: number of a slot -> what stands there.
        ids: B identities; those of a slot lie together.
        adapter: the model.
        batch_size: pictures opened and encoded at once; no others are in memory.
        look: crop, mirror and the VAE's draw; None: the middle, as it is, at the posterior's mean.
        stop: asked before every batch whether to leave off.

    Raises:
        Abandoned: `stop` said so.
    """
    x0, rewards = torch.zeros(len(ids), *adapter.latent_shape()), torch.full((len(ids),), torch.nan)
    texts: dict[int, str] = {}
    waiting: list[tuple[int, Tensor]] = []

    def flush() -> None:
        if stop():
            raise Abandoned
        if waiting:
            rows = [row for row, _ in waiting]
            noise = None if look is None else look.posterior(x0.shape[1:], [ids[row].slot for row in rows])
            x0[rows] = adapter.encode_images(torch.stack([image for _, image in waiting]), noise).float().cpu()
            waiting.clear()

    for row, i in enumerate(ids):
        if i.slot not in texts:
            slot = read(i.slot)
            texts[i.slot] = slot.text
            place, mirror = ((0.5, 0.5), False) if look is None else look.place(i.slot)
        rewards[row], image = slot.rewards[i.sample], slot.images[i.sample]
        if image is None:
            continue
        try:
            shown = fitted(image.open(), adapter.height, adapter.width, place, mirror=mirror)
        except Unreadable as error:
            log.warning("%s", error)
            rewards[row] = torch.nan
            continue
        waiting.append((row, pixels(shown)))
        if len(waiting) == batch_size:
            flush()
    flush()
    return Latents(x0, rewards, texts)


def require_encoder(adapter: ModelAdapter) -> None:
    """Try the model on a grey picture.

    Raises:
        ModelError: it makes no latents of pictures.
    """
    sides = adapter.height, adapter.width
    adapter.encode_images(torch.full((1, 3, *sides), 0.5))
