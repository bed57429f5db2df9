"""The images that a pipeline takes with its prompt: encoded once, kept as rows of a Condition, handed back.

Their encodings come from `encode_prompt` (models/generic/encoding.py), `prepare_latents`, `encode_image` and the
methods that the family names. A part of those results is

    rows      one row per sample: stored in the Condition
    single    of one image, repeated by the pipeline for the whole batch: stored, and splits the batch by image
    constant  the same for all samples whose images have the same sizes: kept here

Where a family holds a part of the latents (a first frame), flowrl's latents are the others, so that no noise, log_prob,
loss or KL knows the held ones. Those of LTX and Sana, which the scheduler never sees, are stored too, with zeros in the
part that it steps; Wan's call puts its own in front of every forward, and what the scheduler makes of them is cut off.
Each entry of the pipeline gets a blank image of the right size, since its own code reads the size.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.media.first_frame import fitted_frame, require_frame
from flowrl.models._vae import decoded_pixels, encoded_pixels
from flowrl.models.base import VaePrecision, network_config
from flowrl.models.generic.encoding import same
from flowrl.models.generic.families import Family, family_of, holds_image, mask_place
from flowrl.models.generic.options import Size, find_networks
from flowrl.models.generic.reentry import Prepared, Visit, replaced

Sizes = tuple[tuple[int, int], ...]
Place = tuple[str, int, int]
"""(method, number of its call, number of the part)."""
LAYOUT, CONTENT, HELD = "images.layout", "images.content", "images.held"
PREPARE, EMBED = "prepare_latents", "encode_image"
ANY = 1000  # a list of images has no limit of its own
LARGEST = 2**18
"""Numbers in the encoded sources of one call, at most: those of FLUX's VAE for 1024 x 1024 px."""
_ASPECT = 0.03
"""Largest difference between aspect ratios of source and sample: both are rounded to multiples of 16 pixels."""


@cache
def blank(size: tuple[int, int], grey: int = 128) -> Image:
    """An image of one colour; size is (width, height)."""
    return new_image("RGB", size, (grey, 255 - grey, grey // 2))


def content(images: Sequence[Image]) -> int:
    """A number below 2^62, equal for equal images alone."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.size}".encode())
        digest.update(image.tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def image_arguments(pipeline: Any, images: Sequence[Image], call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline's own call for the images of one prompt; `call` has those of the size, if any.

    Raises ModelError: too few images, or too many; ValueError: an image that is no frame of this size.
    """
    network, family = next(iter(find_networks(pipeline).values())), family_of(pipeline)
    size = None
    if family.frames and not family.sized_by_image:  # which crops to a size of its own
        parameters = inspect.signature(type(pipeline).__call__).parameters
        size = Size.of(pipeline, (call.get("height"), call.get("width")), family, parameters, network)
    taken = ReferenceImages(family, pipeline, network_config(network), size)
    taken.require(images)
    return taken.arguments([taken.fitted(images)])


def image_methods(family: Family) -> tuple[str, ...]:
    """Methods of the pipeline whose results are kept here, besides `prepare_latents`."""
    return (EMBED, *family.image_methods) if family.images else ()


@dataclass(frozen=True)
class Layout:
    """The encodings that all images of the same sizes share."""

    sizes: Sizes
    prepared: Prepared
    """Result of `prepare_latents`, its latents None."""
    shapes: dict[tuple[str, int], bool]
    """(method, number of its call) -> whether it returns a single value."""
    constants: dict[Place, Any]
    values: int
    """Numbers in the rows of one prompt."""


@dataclass
class ReferenceImages:
    """How one pipeline's images are stored and handed back."""

    family: Family
    pipeline: Any
    config: Mapping[str, Any]
    """Configuration of the network."""
    size: Size | None
    """Size of the generated images; None if the call is never entered and fits images by itself."""
    crop: bool = True
    """A frame of another aspect ratio is cropped, not refused."""
    learned: bool = False
    """`rows` and `single` are known."""
    rows: set[Place] = field(default_factory=set)
    """Parts with one row per sample."""
    single: set[Place] = field(default_factory=set)
    layouts: list[Layout] = field(default_factory=list)
    free: Tensor | None = None
    """Places of flowrl's latents among a sample's, where the others hold the image."""
    whole: tuple[int, ...] = ()
    """Shape of a sample with those that hold the image."""

    @property
    def holds(self) -> bool:
        """A part of a sample is the encoded image and none of flowrl's latents."""
        return holds_image(self.family, self.pipeline)

    @property
    def mask(self) -> int | None:
        """Number of the part of prepare_latents' result that masks kept latents; None: there is none."""
        return mask_place(self.family, self.pipeline)

    @property
    def kind(self) -> str:
        """Name of the pipeline's class."""
        return type(self.pipeline).__name__

    @property
    def limits(self) -> tuple[int, int]:
        """Fewest and most images of a prompt."""
        if self.family.images and self.config.get("image_dim"):
            # Such a Wan embeds one image; with a table of positions always two, the first and the last frame.
            count = 1 if self.config["pos_embed_seq_len"] is None else 2
            return count, count
        if self.mask is not None:
            return 1, 1  # such a Wan ignores a last frame
        return int(self.family.needs_image), ANY if self.family.image_list else len(self.family.images)

    def require(self, images: Sequence[Image]) -> None:
        """Raise ModelError unless a prompt may have so many images, ValueError unless they may be of their sizes."""
        (least, most), count = self.limits, len(images)
        if count < least:
            raise ModelError(
                f"{self.kind} needs {least} image(s) with each prompt: a .jsonl record with 'image' or 'images'"
            )
        if count > most:
            takes = f"takes at most {most} with a prompt" if most else "takes none (see docs/models.md)"
            raise ModelError(f"{count} image(s) with a prompt, but {self.kind} {takes}")
        for image in images:
            self.require_frame(image.size)

    def require_frame(self, size: tuple[int, int]) -> None:
        """Raise ValueError if images are frames of the video, and one of this (width, height) cannot be."""
        if self.family.frames and self.size is not None:
            require_frame(size, self.size.height, self.size.width, crop=self.crop)

    def arguments(self, images: Sequence[Sequence[Image]]) -> dict[str, Any]:
        """Arguments of the call for the images of all its prompts, or of each; the first's, if it takes one for all."""
        if self.family.image_list:
            return {self.family.images[0]: list(images[0])} if any(images) else {}
        each = self.family.image_each and len(images) > 1
        named = zip(self.family.images, zip(*images, strict=True), strict=False)
        return {name: list(column) if each else column[0] for name, column in named}

    def together(self, images: Sequence[Sequence[Image]], done: Sequence[int]) -> list[int]:
        """Numbers of prompts whose rows one call gives: of the first that is not `done`, and others of its sizes.

        A VAE encodes no more at once than one large source. One prompt where a pipeline takes one source for all,
        repeats one embedding or draws its latents; also the first of each sizes, which shows how large they become.
        """
        rest = [k for k in range(len(images)) if k not in done]
        sizes = _sizes(images[rest[0]])
        values = next((known.values for known in self.layouts if known.sizes == sizes), LARGEST)
        several = self.family.image_each and not (self.family.frames or self.single)
        most = max(LARGEST // max(values, 1), 1) if several else 1
        return [k for k in rest if _sizes(images[k]) == sizes][: most if sizes else None]

    def fitted(self, images: Sequence[Image]) -> Sequence[Image]:
        """The images, fitted to the size of the video where they are its frames."""
        if not self.family.frames or self.size is None:
            return images
        return [fitted_frame(image, self.size.height, self.size.width, crop=self.crop) for image in images]

    def mark_free(self, prepared: Prepared) -> tuple[int, ...]:
        """Shape of the latents that the model's mask leaves free; their places in a sample are kept in `free`.

        Raises ModelError: the mask does not leave whole rows of each axis.
        """
        assert self.mask is not None
        mask = prepared.parts[self.mask][:1].expand_as(prepared.latents[:1])[0] != 0
        places = mask.nonzero()
        shape = tuple(len(axis.unique()) for axis in places.unbind(1))
        if math.prod(shape) != len(places):
            raise ModelError(f"{self.kind}: the latents that its mask leaves free are no block")
        self.free, self.whole = mask.flatten().nonzero().squeeze(1), tuple(mask.shape)
        return shape

    def stepped(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What the scheduler is given of a sample [B, ...], at flowrl's latents [B, *shape]."""
        if self.mask is None:
            return values
        assert self.free is not None
        return values.flatten(1).index_select(1, self.free).unflatten(1, shape)

    def find_free(self, latents: Tensor, stepped: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
        """Shape of the latents that the scheduler steps; their places in latents [1, ...] are kept in `free`.
        `stepped`: latents of the whole sample -> those that reach the scheduler; called with the places themselves.
        Raises ModelError: these are not a selection of the others in some order.
        """
        places = torch.arange(latents.numel(), dtype=torch.float32, device=latents.device)
        given = stepped(places.view_as(latents))
        free = given.flatten().long().clamp(0, len(places) - 1)
        if len(free.unique()) < len(free) or not torch.equal(places[free], given.flatten().float()):
            raise ModelError(f"{self.kind} changes the latents between prepare_latents() and scheduler.step()")
        self.free = free
        return tuple(given.shape[1:])

    def learn(self, enter: Callable[[int], Visit]) -> None:
        """Find the rows; enter(batch) calls the pipeline with the same image for every prompt.

        Raises ModelError: a part has neither one row per sample nor the same value for every number of samples.
        """
        if self.learned:
            return
        one = self._parts(enter(1))
        # If a call takes one prompt only, every part of one row has one per sample.
        two = None if self.family.singly else self._parts(enter(2))
        for place, a in one.items():
            b = a if two is None else two[place]
            if torch.is_tensor(a) and torch.is_tensor(b) and a.ndim and len(a) == 1 and (two is None or len(b) == 2):
                self.rows.add(place)
            elif not same(a, b):
                raise ModelError(f"{self.kind}: {place[0]}() returns a part {place[2]} that depends on the batch")
            elif place[0] == EMBED:
                self.single.add(place)
        self.learned = True

    def source(self, enter: Callable[[], Visit], precision: VaePrecision) -> Tensor | None:
        """As `ModelAdapter.source_of`; `enter` calls the pipeline with the image, up to its network."""
        if self.family.frames or self.size is None:
            return None  # a first frame is no source of an edit
        vae, given = self.pipeline.vae, list[Tensor]()
        encode, size = vae.encode, (self.size.height, self.size.width)

        def heard(pixels: Tensor, *rest: Any, **options: Any) -> Any:
            given.append(pixels)
            return encode(pixels, *rest, **options)

        with replaced(vae, {"encode": heard}):
            enter()
        if not given or abs(given[0].shape[-2] * size[1] / (given[0].shape[-1] * size[0]) - 1) > _ASPECT:
            return None
        pixels = given[0].float().reshape(1, 3, *given[0].shape[-2:]) / 2 + 0.5
        fitted = interpolate(pixels, size, mode="bilinear", antialias=True)
        frame = fitted.view(*given[0].shape[:-2], *size)  # of a VAE for videos, which takes a video of one frame
        trip = decoded_pixels(vae, encoded_pixels(vae, frame, precision, None), precision)
        return torch.cat([fitted, trip.view_as(fitted)])

    def _parts(self, visit: Visit) -> dict[Place, Any]:
        """All encodings of the images, without the latents."""
        prepared = visit.prepared
        assert prepared is not None
        result = {(PREPARE, 0, i): part for i, part in enumerate(prepared.parts) if i != (prepared.place or 0)}
        for method in image_methods(self.family):
            for k, value in enumerate(visit.returned.get(method, ())):
                parts = value if isinstance(value, tuple) else (value,)
                result |= {(method, k, i): part for i, part in enumerate(parts)}
        return result

    def entries(self, visit: Visit, images: Sequence[Sequence[Image]]) -> dict[str, Tensor | list[Tensor]]:
        """Rows of a Condition for prompts whose images have the same sizes, from a call with them.

        Raises ModelError: a part depends on the images without one row per sample.
        """
        assert visit.prepared is not None
        parts, latents = self._parts(visit), visit.prepared.latents
        entries: dict[str, Tensor | list[Tensor]] = {
            LAYOUT: torch.tensor([self._layout(visit, parts, _sizes(images[0]))] * len(images)),
            CONTENT: torch.tensor([content(own) for own in images]),
        }
        for place in sorted(self.rows | self.single):
            part = parts[place]
            entries[_name(place)] = [row.clone() for row in (part if place in self.rows else [part])]
        if self.family.holds:  # of a mask nothing is left: the call itself puts the image there
            held = latents[0].flatten().clone()
            if self.free is not None:
                held[self.free] = 0.0
            entries[HELD] = [held.view_as(latents[0])]
        return Condition(entries).to(latents.device).tensors

    def _layout(self, visit: Visit, parts: dict[Place, Any], sizes: Sizes) -> int:
        assert visit.prepared is not None
        constants = {place: part for place, part in parts.items() if place not in self.rows | self.single}
        for number, known in enumerate(self.layouts):
            if known.sizes == sizes:
                for place, part in known.constants.items():
                    if not same(part, constants.get(place)):
                        raise ModelError(
                            f"{self.kind}: {place[0]}() returns a part {place[2]} that depends on the image without "
                            "one row per sample"
                        )
                return number
        prepared = Prepared((None,) * len(visit.prepared.parts), visit.prepared.place, visit.prepared.dtype)
        shapes = {
            (method, k): not isinstance(value, tuple)
            for method in image_methods(self.family)
            for k, value in enumerate(visit.returned.get(method, ()))
        }
        values = sum(parts[place][0].numel() for place in self.rows)
        self.layouts.append(Layout(sizes, prepared, shapes, constants, values))
        return len(self.layouts) - 1

    def key(self, cond: Condition, row: int) -> tuple:
        """Key of a row; rows of equal keys may share a forward.

        The sizes, and the image itself where it is embedded, since pipelines repeat one embedding for the whole batch.
        """
        if LAYOUT not in cond.tensors:
            return ()
        return (int(cond[LAYOUT][row]), int(cond[CONTENT][row]) if self.single else None)

    def rebuild(self, cond: Condition) -> dict[str, Any]:
        """Options of an entry for rows of one key."""
        if LAYOUT not in cond.tensors:
            return {}
        kept = self.layouts[int(cond[LAYOUT][0])]
        parts = dict(kept.constants)
        for place in self.rows:
            parts[place] = torch.stack(cond[_name(place)])
        for place in self.single:
            parts[place] = cond[_name(place)][0]
        answers: dict[str, list[Any]] = {}
        for (method, k), alone in kept.shapes.items():
            value = tuple(part for place, part in sorted(parts.items()) if place[:2] == (method, k))
            answers.setdefault(method, []).append(value[0] if alone else value)
        base = kept.prepared
        own = [parts.get((PREPARE, 0, i)) for i in range(len(base.parts))]
        if self.family.holds:
            own[base.place or 0] = torch.stack(cond[HELD])
        elif self.mask is not None:
            own[base.place or 0] = torch.zeros(len(cond), *self.whole, device=cond[CONTENT].device)
        prepared = Prepared(tuple(own), base.place, base.dtype, self.free)
        return {"prepared": prepared, "answers": answers, "images": [[blank(size) for size in kept.sizes]]}

    def to(self, device: torch.device) -> None:
        self.free = None if self.free is None else self.free.to(device)
        for number, kept in enumerate(self.layouts):
            moved = {k: part.to(device) if torch.is_tensor(part) else part for k, part in kept.constants.items()}
            self.layouts[number] = replace(kept, constants=moved)


def _sizes(images: Sequence[Image]) -> Sizes:
    return tuple(image.size for image in images)


def _name(place: Place) -> str:
    return "images." + ".".join(map(str, place))
