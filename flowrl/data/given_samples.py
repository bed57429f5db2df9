"""Given images and videos: the draw of an iteration, and their latents in its slots.

A pair is a slot of two samples, the chosen image with reward 1 and the rejected one with reward 0. A winner, or a
single image with a label, is a slot of one sample. So a `Rollout` is the same for drawn and for given samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.files import known_object
from flowrl.core.rng import normal, permutation, stream
from flowrl.core.types import Identity, Member, SampleId
from flowrl.data.contents import Input, set_of
from flowrl.data.labels import Labelled, LabelledSet, LabelledSource, labelled
from flowrl.data.options import PairsConfig
from flowrl.data.preference_records import StoredImage, Unreadable
from flowrl.data.preferences import PreferenceSet, PreferenceSource, load_preferences
from flowrl.data.prompts import identity, under_box
from flowrl.data.stored_videos import Frames
from flowrl.display.console import log
from flowrl.media.eight_bits import unit_floats
from flowrl.media.media import fitted
from flowrl.models.base import ModelAdapter, image_shape

PAIR: tuple[Member, ...] = ("chosen", "rejected")
GivenSource = PreferenceSource | LabelledSource
"""The order over the records of a set."""
HELD_OUT = 500
"""Default of `data.pairs.max_eval`."""


class TooManyLost(ConfigError):
    """More images are unreadable than allowed; raised on all processes between two updates."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Caption, images and rewards of a slot."""

    caption: Identity
    images: tuple[StoredImage | None, ...]
    """Image of each sample; None: the network draws it, or the record cannot be read."""
    rewards: tuple[float, ...]
    """Reward of each sample, 1 or 0, or the margin of a pair and 0; NaN: the record cannot be read."""
    keys: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Seed and key of the initial noise of each sample; (): not asked for."""
    covers: bool = False
    """Whether the sources beside the caption are cropped as the images are."""

    def asked(self, adapter: Any, place: tuple[float, float], *, mirror: bool) -> Identity:
        """The caption, its sources under the crop of the images where they are to be."""
        if not self.covers:
            return self.caption
        shape = adapter.height, adapter.width, place
        return self.caption[0], tuple(under_box(file, *shape, mirror=mirror) for file in self.caption[1])


@dataclass(frozen=True, slots=True)
class Latents:
    """Latents of B samples in the slots of an iteration."""

    x0: Tensor
    """[B, ...] float32 on the CPU; zeros if the network draws the sample, or the image cannot be read."""
    rewards: Tensor
    """[B] float32; NaN if the image cannot be read."""
    texts: dict[int, Identity]
    """Slot -> caption, with the paths of the images that it edits."""
    initial: Tensor | None = None
    """Initial noise that the samples were drawn from, [B, ...] float32; None: not asked for."""


@dataclass(frozen=True, slots=True)
class Look:
    """Augmentation of the images of an iteration, the same for both of a pair, so that equal images stay equal."""

    options: PairsConfig
    seed: int
    iteration: int

    def place(self, slot: int) -> tuple[tuple[float, float], bool]:
        """((down, across) position of the crop in [0, 1], whether it is mirrored)."""
        across, down, coin = stream(self.seed, "look", self.iteration, slot).random(3).tolist()
        return ((down, across) if self.options.crop == "random" else (0.5, 0.5)), self.options.flip and coin < 0.5

    def moment(self, slot: int) -> float:
        """Position in time of the frames that are taken of a longer video, in [0, 1]."""
        random = self.options.crop == "random"
        return float(stream(self.seed, "look/moment", self.iteration, slot).random()) if random else 0.5

    def caption(self, slot: int, given: Identity) -> Identity:
        """The caption of a slot, its text "" if it is dropped."""
        dropped = stream(self.seed, "caption_dropout", self.iteration, slot).random() < self.options.caption_dropout
        return ("", given[1]) if dropped else given

    def posterior(self, shape: Sequence[int], slots: Sequence[int]) -> Tensor | None:
        """Noise of the VAE's posterior for one image of each slot, [len(slots), *shape]; None: its mean is taken."""
        if self.options.posterior == "mean":
            return None
        return normal(shape, self.seed, "posterior", [(self.iteration, slot) for slot in slots])


class Given:
    """The images that a run learns from, and the held-out pairs. `options` name the sets, `seed` is that of the order;
    the method `algorithm` has members of a slot, and options for single images. `num_frames`: of the model's videos; 1:
    images. `key`: the configuration key, for messages.

    Raises ConfigError: a set that cannot be used.
    """

    def __init__(
        self, options: PairsConfig, algorithm: Any, seed: int, num_frames: int = 1, key: str = "data.pairs"
    ) -> None:
        self.key, self.method = key, algorithm
        self.options, self.members, self.seed = options, tuple(algorithm.members), seed
        paired = "rejected" in self.members
        videos = Frames(num_frames, cut=options.frames == "cut") if num_frames > 1 else None
        self.graded = algorithm.graded
        """Whether the rewards of a pair are its margin and 0."""
        self.own_noise = algorithm.eps == "own"
        """Whether samples come with the initial noise that they were drawn from."""
        if self.own_noise:
            require_own_noise(options, f"{key}.path")
        form = {"paired": paired, "graded": self.graded, "videos": videos}
        self.pairs = load_preferences(options.path, f"{key}.path", options.records, **form)
        self.records: PreferenceSet | LabelledSet = self.pairs
        self.source: PreferenceSource | LabelledSource
        if "labelled" in self.members:
            self.records = labelled(self.pairs, algorithm.config.mixed)
            share = algorithm.config.liked_share
            self.source = LabelledSource(self.records, options.per_iteration, seed, share)
        else:
            self.source = PreferenceSource(self.pairs, options.per_iteration, seed)
        self.asked = self.lost = 0
        """Slots that this process of the program has drawn, and those of them with an unreadable image."""
        self.held_out: PreferenceSet | None = None
        if options.eval is not None:
            self.held_out = load_preferences(options.eval, "data.pairs.eval", options.records, videos=videos)

    @property
    def held_out_numbers(self) -> list[int]:
        """Numbers of the held-out pairs to evaluate, ascending: a random subset, since sets are often sorted."""
        count = 0 if self.held_out is None else len(self.held_out)
        most = HELD_OUT if self.options.max_eval is None else self.options.max_eval
        return sorted(permutation(count, self.seed, "held_out").tolist()[:most])

    def captions(self) -> list[Identity]:
        """All captions of forwards, with the empty ones, for a cache of embeddings."""
        own = [*self.pairs.captions(), *(() if self.held_out is None else self.held_out.captions())]
        return [*dict.fromkeys(("", images) for _, images in own), *own]

    def facts(self) -> dict[str, Any]:
        """Contents of the sets and the reasons of skipped records, for provenance.json."""
        name = self.key.partition(".")[2]
        result = {name: self.pairs.report.facts()}
        if isinstance(self.records, LabelledSet):
            result[name]["images"] = self.records.counts
        return result if self.held_out is None else result | {"eval_pairs": self.held_out.report.facts()}

    def contents(self) -> list[Input]:
        """Contents of the sets by their scans, with names and sizes of their files; no image is read."""
        result = []
        for key, source, pairs in (
            (f"{self.key}.path", self.options.path, self.pairs),
            ("data.pairs.eval", self.options.eval, self.held_out),
        ):
            if pairs is not None:
                scanned = {"scan": pairs.fingerprint, "files": pairs.report.files()}
                result.append(set_of(key, str(source), f"{len(pairs)} records", scanned))
        return result

    def require_readable(self, lost: int, count: int) -> None:
        """Add an iteration's slots, `lost` of `count` with an unreadable image, and check all so far.

        With p = max_broken the run stops if, of all n slots that this process of the program has drawn,

            lost > p n + 4 sqrt(p (1 - p) n) + 1

        Draws from a set at its limit exceed p n every other time, and this bound about once in 30,000 times.

        Raises TooManyLost: the bound is exceeded.
        """
        self.lost, self.asked = self.lost + lost, self.asked + count
        share = self.options.records.max_broken
        if self.lost > share * self.asked + 4 * math.sqrt(share * (1 - share) * self.asked) + 1:
            raise TooManyLost(
                f"{self.key}.path={self.options.path!r}: {self.lost} of {self.asked} pairs drawn so far have an image "
                f"that cannot be read, more than {self.key}.records.max_broken={share} explains; mend the images "
                "(the warnings name them), or raise it, and go on with --resume"
            )


def require_own_noise(options: PairsConfig, key: str) -> None:
    """Raise ConfigError unless the pairs are of `flowrl pairs` by a deterministic sampler, and are shown as drawn."""
    where, made = f"algorithm.noise=own: {key}={options.path!r}", known_object(Path(options.path) / "pairs.json")
    if not made:
        raise ConfigError(
            f"{where} is no folder of `flowrl pairs`, whose records say what noise an image came from",
            {"algorithm.noise": "fresh"},
        )
    if (sampler := made["made_with"]["sampler"]) is not None:
        raise ConfigError(
            f"{where} was drawn by rollout.sampler={sampler['name']}, whose images have noise of every step in them",
            {"algorithm.noise": "fresh"},
        )
    if options.flip:
        raise ConfigError(f"{where}: images would be mirrored, and not their noise", {"data.pairs.flip": False})


def slot_of(
    records: PreferenceSet | LabelledSet,
    number: int,
    members: Sequence[Member],
    *,
    graded: bool = False,
    own: bool = False,
) -> Slot:
    """The slot of a record, `graded` with its margin as the reward of the chosen image, `own` with keys of its noise.

    Without images and with NaN rewards if it cannot be read.
    """
    pairs = records.pairs if isinstance(records, LabelledSet) else records
    covers = pairs.options.source_fit == "cover"
    try:
        record = records.read(number)
    except Unreadable as error:
        log.warning("%s", error)
        none, unknown = (None,) * len(members), (math.nan,) * len(members)
        return Slot(("", pairs.some_sources), none, unknown, covers=covers)
    if isinstance(record, Labelled):
        return Slot(identity(record.prompt), (record.image,), ((record.label + 1) / 2,), covers=covers)
    images = {"chosen": record.chosen, "rejected": record.rejected}
    best = 1.0 if not graded or record.margin is None else record.margin
    rewards = tuple(best if m == "chosen" else 0.0 for m in members)
    drawn = record.prompt.metadata.get("drawn", {})
    keys = [(drawn["seed"], (drawn["round"], drawn["prompt"], drawn[member])) for member in members if own]
    return Slot(identity(record.prompt), tuple(map(images.get, members)), rewards, tuple(keys), covers)


def latents_of(
    read: Callable[[int], Slot],
    ids: Sequence[SampleId],
    adapter: Any,
    *,
    batch_size: int,
    look: Look | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Latents:
    """Latents of the images or videos of B samples: opened, brought to the model's size, and encoded in batches.

    `read`: number of a slot -> slot; of the B identities those of a slot are adjacent. `batch_size` images are opened
    and encoded at once; no others are in memory, and they are uint8 until they are encoded. `look`: crop, mirror and
    the VAE's draw; None: the middle, not mirrored, at the posterior's mean. `stop` is called before every batch.

    Raises Abandoned: `stop` returned true.
    """
    x0, rewards = torch.zeros(len(ids), *adapter.latent_shape()), torch.full((len(ids),), torch.nan)
    texts: dict[int, Identity] = {}
    initial: dict[int, Tensor] = {}
    waiting: list[tuple[int, Tensor]] = []

    def flush() -> None:
        if stop():
            raise Abandoned
        if waiting:
            rows = [row for row, _ in waiting]
            noise = None if look is None else look.posterior(x0.shape[1:], [ids[row].slot for row in rows])
            given = unit_floats(torch.stack([image for _, image in waiting]))
            x0[rows] = adapter.encode_images(given, noise).float().cpu()
            waiting.clear()

    for row, i in enumerate(ids):
        if i.slot not in texts:
            slot = read(i.slot)
            place, mirror = ((0.5, 0.5), False) if look is None else look.place(i.slot)
            texts[i.slot] = slot.asked(adapter, place, mirror=mirror)
            moment = 0.5 if look is None else look.moment(i.slot)
        rewards[row], image = slot.rewards[i.sample], slot.images[i.sample]
        if slot.keys:
            seed, key = slot.keys[i.sample]
            initial[row] = normal(x0.shape[1:], seed, "pairs/initial", [key])[0]
        if image is None:
            continue
        try:
            waiting.append((row, _shown(image, adapter, moment, place, mirror, as_drawn=bool(slot.keys))))
        except Unreadable as error:
            log.warning("%s", error)
            rewards[row] = torch.nan
            continue
        if len(waiting) == batch_size:
            flush()
    flush()
    # Of a record that cannot be read there is no noise, and nothing is trained on it.
    own = torch.stack([initial.get(row, x0[row]) for row in range(len(ids))]) if initial else None
    return Latents(x0, rewards, texts, own)


def _shown(
    image: StoredImage, adapter: Any, moment: float, place: tuple[float, float], mirror: bool, *, as_drawn: bool
) -> Tensor:
    """An image [3, H, W] or a video [F, 3, H, W] at the model's size, uint8; `as_drawn` it must have that size."""
    video = adapter.num_frames > 1
    frames = image.frames(adapter.num_frames, moment) if video else [image.open()]
    if as_drawn and frames[0].size != (adapter.width, adapter.height):
        raise ConfigError(
            f"algorithm.noise=own: {image.where} has {frames[0].size} pixels, and the model makes "
            f"{(adapter.width, adapter.height)}: its noise belongs to another size"
        )
    small = [fitted(frame, adapter.height, adapter.width, place, mirror=mirror) for frame in frames]
    levels = torch.as_tensor(np.stack([np.asarray(frame) for frame in small])).permute(0, 3, 1, 2).contiguous()
    return levels if video else levels[0]


def require_encoder(adapter: ModelAdapter) -> None:
    """Encode a grey image or video as a test. Raises ModelError: the model cannot encode, or not so many frames."""
    adapter.encode_images(torch.full((1, *image_shape(adapter)), 0.5))
