"""Prompt data: text files, JSONL with metadata and pictures, the shapes world; the order of a run; embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl import shapes
from flowrl.config import ConfigError
from flowrl.models.base import PACKAGE, ModelAdapter
from flowrl.rng import permutation
from flowrl.types import Condition

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with whatever else its record holds (handed to the rewards as metadata)."""

    text: str
    metadata: dict = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    """Absolute paths of its reference pictures or first frame; the rewards find them as metadata["images"]."""


def load_prompts(source: str, key: str) -> list[Prompt]:
    """Prompts of a .txt, a .jsonl, an embedded list such as `shapes-train.txt`, or `shapes:train|heldout`.

    Args:
        source: where they are.
        key: the configuration key, for the message.

    Raises:
        ConfigError: no such file, an empty list, a broken line, a picture that is missing or cannot be read.
    """
    if source.startswith("shapes:"):
        try:
            return [Prompt(text) for text in shapes.prompts(source.removeprefix("shapes:"))]
        except ValueError as error:
            raise ConfigError(f"{key}={source!r}: {error}") from None
    file = _find(source)
    if file is None:
        raise ConfigError(f"{key}={source!r}: there is no such file; give a .txt (one prompt a line) or a .jsonl")
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={source!r}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    # Not splitlines: it also breaks at U+2028 and the like, which JSON strings may hold.
    lines = [line.strip() for line in text.split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
    if not numbered:
        raise ConfigError(f"{key}={source!r}: the file holds no prompt; write one a line")
    if file.suffix != ".jsonl":
        return [Prompt(line) for _, line in numbered]
    read: set[Path] = set()
    return [_record(line, f"{key}={source!r}, line {number}", file.parent, read) for number, line in numbered]


def _find(source: str) -> Path | None:
    places = [
        Path(source).expanduser(),
        PACKAGE / "assets/prompts" / source,
        PACKAGE.parent / "assets/prompts" / source,
    ]
    return next((place for place in places if place.is_file()), None)


def _record(line: str, where: str, folder: Path, read: set[Path]) -> Prompt:
    """A line of a .jsonl; its pictures are tried unless they are among those already `read`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f"{where}: needs an object with a string under 'prompt', got {line[:80]!r}")
    metadata = {k: v for k, v in record.items() if k not in ("prompt", "image", "images")}
    names = _picture_names(record, where)
    if not names:
        return Prompt(record["prompt"], metadata)
    files = [folder.joinpath(Path(name).expanduser()).resolve() for name in names]
    for name, file in zip(names, files, strict=True):
        if file not in read:
            _try_picture(name, file, where)
            read.add(file)
    pictures = tuple(str(file) for file in files)
    return Prompt(record["prompt"], metadata | {"images": list(pictures)}, pictures)


def _picture_names(record: dict, where: str) -> list[str]:
    """Paths under "image" or "images", as the record has them."""
    if "image" in record and "images" in record:
        raise ConfigError(f"{where}: has both 'image' and 'images'; keep one of them")
    if "image" in record:
        given = [record["image"]]
    elif "images" in record:
        given = record["images"]
    else:
        return []
    if not isinstance(given, list) or not given or not all(isinstance(name, str) and name for name in given):
        raise ConfigError(f"{where}: needs a path under 'image', or a list of paths under 'images'; got {given!r}")
    return given


def _try_picture(name: str, file: Path, where: str) -> None:
    if not file.is_file():
        raise ConfigError(f"{where}: there is no picture {name!r} ({file}); paths are relative to the file of prompts")
    try:
        open_picture(file)
    # Pillow reports a broken PNG as SyntaxError, a broken header as ValueError, anything else as OSError.
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be read as a picture: {error}") from None


def open_picture(path: str | Path) -> Image:
    """RGB, turned upright."""
    from PIL import Image, ImageOps

    with Image.open(path) as picture:
        return ImageOps.exif_transpose(picture).convert("RGB")


def require_pictures(prompts: Sequence[Prompt], adapter: ModelAdapter, key: str, first: Prompt) -> None:
    """Raise ConfigError unless every prompt has as many pictures as the model wants; as `first`, all or none have some.

    Their embeddings lie in one table, so they must be made alike.
    """
    least, most = picture_limits(adapter)
    kind = type(getattr(adapter, "pipeline", adapter)).__name__
    for number, prompt in enumerate(prompts, 1):
        count, where = len(prompt.pictures), f"{key}: prompt {number}, {prompt.text[:60]!r},"
        if count > most:
            remedy = f"leave out {count - most}" if most else "use a model that edits or animates pictures"
            raise ConfigError(f"{where} has {count} picture(s), but {kind} takes {most or 'none'}; {remedy}")
        if count < least:
            raise ConfigError(
                f"{where} has {count} picture(s), but {kind} needs {least}; give the paths under 'image' or 'images' "
                "in a .jsonl"
            )
        if bool(count) != bool(first.pictures):
            raise ConfigError(
                f"{where} has {'a' if count else 'no'} picture, unlike the first prompt; give one to all or to none"
            )


def picture_limits(adapter: ModelAdapter) -> tuple[int, int]:
    """Least and most pictures of a prompt; an adapter that does not say takes text only."""
    return getattr(adapter, "picture_limits", (0, 0))


class PromptSource:
    """An endless, seeded order over prompts: epoch after epoch, each a fresh permutation.

    The draw of an iteration depends on (seed, iteration) alone, so a resume needs no state.
    """

    def __init__(self, prompts: Sequence[Prompt], per_iteration: int, seed: int) -> None:
        self.prompts, self.per_iteration, self.seed = list(prompts), per_iteration, seed

    def draw(self, iteration: int) -> list[int]:
        """Indices of the prompts of an iteration, counted from 1, one per slot."""
        start, count = (iteration - 1) * self.per_iteration, len(self.prompts)
        orders: dict[int, Tensor] = {}
        drawn = []
        for position in range(start, start + self.per_iteration):
            epoch = position // count
            if epoch not in orders:
                orders[epoch] = permutation(count, self.seed, "prompts", epoch)
            drawn.append(int(orders[epoch][position % count]))
        return drawn


class Texts:
    """Embeddings of prompts and their pictures: all made once and the encoders freed, or made when asked for.

    The cache lies in host memory, since thousands of long prompts take more than a denoiser does; `lookup` brings
    the few that an iteration needs to the device they were made on.
    """

    def __init__(
        self, adapter: ModelAdapter, prompts: Sequence[str | Prompt], *, cache: bool, batch_size: int = 64
    ) -> None:
        self.adapter, self.batch_size = adapter, batch_size
        self.rows: dict[tuple[str, tuple[str, ...]], int] = {}
        self.table: Condition | None = None
        if cache:
            unique = list(dict.fromkeys(_identity(prompt) for prompt in prompts))
            parts = self._batches(unique)
            first = next(iter(parts))
            self.device = first.device
            self.table = Condition.collate([first.to("cpu"), *(part.to("cpu") for part in parts)])
            self.rows = {identity: row for row, identity in enumerate(unique)}
            adapter.free_text_encoders()

    def lookup(self, prompts: Sequence[str | Prompt]) -> Condition:
        """Conditions of P prompts, in order; a text stands for a prompt without pictures."""
        wanted = [_identity(prompt) for prompt in prompts]
        if self.table is None:
            return Condition.collate(list(self._batches(wanted)))
        return self.table.index(torch.tensor([self.rows[identity] for identity in wanted])).to(self.device)

    def _batches(self, wanted: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[Condition]:
        for start in range(0, len(wanted), self.batch_size):
            part = wanted[start : start + self.batch_size]
            texts = [text for text, _ in part]
            if not any(files for _, files in part):
                yield self.adapter.encode(texts)
                continue
            encode: Any = self.adapter.encode  # with pictures, for adapters that declare picture_limits
            yield encode(texts, [[open_picture(file) for file in files] for _, files in part])


def _identity(prompt: str | Prompt) -> tuple[str, tuple[str, ...]]:
    """What an embedding depends on: text and pictures."""
    return (prompt, ()) if isinstance(prompt, str) else (prompt.text, prompt.pictures)
