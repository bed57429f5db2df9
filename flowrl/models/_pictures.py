"""The pictures that a pipeline takes beside its prompt: encoded once, kept as rows of a Condition, handed back.

What a pipeline makes of them comes from `encode_prompt` (models/_encoding.py keeps it), `prepare_latents` and
`encode_image`. Of what `prepare_latents` returns beside the latents, a part is

    rows      one row per sample: stored in the Condition
    constant  the same for all samples whose pictures have the same sizes: kept here

Each entry of the pipeline still gets a blank picture of the right size, since its own code looks at the size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.models._families import Family
from flowrl.models._reentry import Prepared, Visit
from flowrl.models.base import ModelError
from flowrl.types import Condition

if TYPE_CHECKING:
    from PIL.Image import Image

Sizes = tuple[tuple[int, int], ...]
LAYOUT, CONTENT = "pictures.layout", "pictures.content"


@cache
def blank(size: tuple[int, int], grey: int = 128) -> Image:
    """A picture of one colour; size is (width, height)."""
    from PIL import Image

    return Image.new("RGB", size, (grey, 255 - grey, grey // 2))


def content(pictures: Sequence[Image]) -> int:
    """A number below 2^62 that equal pictures share, and others not."""
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(f"{picture.size}".encode())
        digest.update(picture.tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


@dataclass
class Pictures:
    """How one pipeline's pictures are stored and handed back."""

    family: Family
    kind: str
    """Name of the pipeline's class."""
    config: Any
    """The network's."""
    rows: set[int] | None = None
    """Places of `prepare_latents` with one row per sample; None: not learned yet."""
    layouts: list[tuple[Sizes, Prepared]] = field(default_factory=list)
    """Sizes of pictures -> what the constant parts are there."""

    @property
    def limits(self) -> tuple[int, int]:
        """Least and most pictures of a prompt."""
        if self.family.pictures and getattr(self.config, "image_dim", None):
            # Such a Wan embeds one picture; with a table of positions always two, the first and the last frame.
            count = 1 if self.config.pos_embed_seq_len is None else 2
            return count, count
        return int(self.family.needs_picture), len(self.family.pictures)

    def require(self, count: int) -> None:
        """Raise ModelError unless a prompt may have that many pictures."""
        least, most = self.limits
        if count < least:
            raise ModelError(
                f"{self.kind} needs {least} picture(s) with each prompt: a .jsonl record with 'image' or 'images'"
            )
        if count > most:
            takes = f"takes at most {most} with a prompt" if most else "takes none (see docs/models.md)"
            raise ModelError(f"{count} picture(s) with a prompt, but {self.kind} {takes}")

    def arguments(self, pictures: Sequence[Image], batch: int) -> dict[str, Any]:
        """Arguments of the call: one picture for all prompts, or the same one for each."""
        each = self.family.picture_each and batch > 1
        named = zip(self.family.pictures, pictures, strict=False)
        return {name: [picture] * batch if each else picture for name, picture in named}

    def learn(self, enter: Callable[[int], Visit]) -> None:
        """Find the rows: enter(batch) calls the pipeline with the same picture for every prompt.

        Raises:
            ModelError: a part has neither one row per sample nor the same value for any number of samples.
        """
        if self.rows is not None:
            return
        one, two = enter(1).prepared, enter(2).prepared
        assert one is not None
        assert two is not None
        found = set()
        for i, (a, b) in enumerate(zip(one.parts, two.parts, strict=True)):
            if i == (one.place or 0):
                continue
            if torch.is_tensor(a) and torch.is_tensor(b) and a.ndim and len(a) == 1 and len(b) == 2:
                found.add(i)
            elif not _same(a, b):
                raise ModelError(f"{self.kind}: prepare_latents() returns a part {i} that depends on the batch")
        self.rows = found

    def entries(self, visit: Visit, pictures: Sequence[Image]) -> dict[str, Tensor | list[Tensor]]:
        """Rows of a Condition for one prompt, from a call with its pictures.

        Raises:
            ModelError: a part depends on the pictures and has not one row per sample.
        """
        prepared = visit.prepared
        assert prepared is not None
        assert self.rows is not None
        sizes = tuple(picture.size for picture in pictures)
        entries: dict[str, Tensor | list[Tensor]] = {
            LAYOUT: torch.tensor([self._layout(sizes, prepared)]),
            CONTENT: torch.tensor([content(pictures)]),
        }
        for i in sorted(self.rows):
            entries[f"pictures.latents.{i}"] = [prepared.parts[i][0].clone()]
        for k, value in enumerate(visit.seen):
            entries[f"pictures.embeds.{k}"] = [value.clone()]
        return {name: _on(value, prepared.latents.device) for name, value in entries.items()}

    def _layout(self, sizes: Sizes, prepared: Prepared) -> int:
        assert self.rows is not None
        for number, (known, kept) in enumerate(self.layouts):
            if known == sizes:
                for i, part in enumerate(kept.parts):
                    if part is not None and not _same(part, prepared.parts[i]):
                        raise ModelError(
                            f"{self.kind}: prepare_latents() returns a part {i} that depends on the picture and has "
                            "not one row per sample"
                        )
                return number
        mine = {*self.rows, prepared.place or 0}
        parts = tuple(None if i in mine else part for i, part in enumerate(prepared.parts))
        self.layouts.append((sizes, Prepared(parts, prepared.place, prepared.dtype)))
        return len(self.layouts) - 1

    def key(self, cond: Condition, row: int) -> tuple:
        """Rows of equal keys may share a forward: of the same sizes; of the same picture where it is embedded,
        since pipelines repeat one embedding for the whole batch."""
        if LAYOUT not in cond.tensors:
            return ()
        embedded = any(name.startswith("pictures.embeds.") for name in cond.tensors)
        return (int(cond[LAYOUT][row]), int(cond[CONTENT][row]) if embedded else None)

    def rebuild(self, cond: Condition) -> dict[str, Any]:
        """Options of `Generic._enter` for rows of one key."""
        if LAYOUT not in cond.tensors:
            return {}
        sizes, kept = self.layouts[int(cond[LAYOUT][0])]
        parts = list(kept.parts)
        for i in sorted(self.rows or ()):
            parts[i] = torch.stack(cond[f"pictures.latents.{i}"])
        names = sorted(name for name in cond.tensors if name.startswith("pictures.embeds."))
        return {
            "prepared": Prepared(tuple(parts), kept.place, kept.dtype),
            "seen": [cond[name][0] for name in names],
            "pictures": [blank(size) for size in sizes],
        }

    def to(self, device: torch.device) -> None:
        for number, (sizes, kept) in enumerate(self.layouts):
            parts = tuple(part.to(device) if torch.is_tensor(part) else part for part in kept.parts)
            self.layouts[number] = (sizes, Prepared(parts, kept.place, kept.dtype))


def _on(value: Tensor | list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    return [row.to(device) for row in value] if isinstance(value, list) else value.to(device)


def _same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
