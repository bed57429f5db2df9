"""Prompt data: text files, JSONL with metadata, the shapes world; the order of a run; cached embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flowrl import shapes
from flowrl.config import ConfigError
from flowrl.models.base import PACKAGE, ModelAdapter
from flowrl.rng import permutation
from flowrl.types import Condition


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with whatever else its record holds (handed to the rewards as metadata)."""

    text: str
    metadata: dict = field(default_factory=dict)


def load_prompts(source: str, key: str) -> list[Prompt]:
    """Prompts of a .txt, a .jsonl, an embedded list such as `shapes-train.txt`, or `shapes:train|heldout`.

    Args:
        source: where they are.
        key: the configuration key, for the message.

    Raises:
        ConfigError: no such file, an empty list, a broken line.
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
    return [_record(line, f"{key}={source!r}, line {number}") for number, line in numbered]


def _find(source: str) -> Path | None:
    places = [
        Path(source).expanduser(),
        PACKAGE / "assets/prompts" / source,
        PACKAGE.parent / "assets/prompts" / source,
    ]
    return next((place for place in places if place.is_file()), None)


def _record(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f"{where}: needs an object with a string under 'prompt', got {line[:80]!r}")
    return Prompt(record["prompt"], {k: v for k, v in record.items() if k != "prompt"})


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
    """Text embeddings of prompts: all made once and the encoders freed, or made when asked for.

    The cache lies in host memory, since thousands of long prompts take more than a denoiser does; `lookup` brings
    the few that an iteration needs to the device they were made on.
    """

    def __init__(self, adapter: ModelAdapter, prompts: Sequence[str], *, cache: bool, batch_size: int = 64) -> None:
        self.adapter, self.batch_size = adapter, batch_size
        self.rows: dict[str, int] = {}
        self.table: Condition | None = None
        if cache:
            unique = list(dict.fromkeys(prompts))
            parts = self._batches(unique)
            first = next(iter(parts))
            self.device = first.device
            self.table = Condition.collate([first.to("cpu"), *(part.to("cpu") for part in parts)])
            self.rows = {text: row for row, text in enumerate(unique)}
            adapter.free_text_encoders()

    def lookup(self, prompts: Sequence[str]) -> Condition:
        """Conditions of P prompts, in order."""
        if self.table is None:
            return Condition.collate(list(self._batches(prompts)))
        return self.table.index(torch.tensor([self.rows[text] for text in prompts])).to(self.device)

    def _batches(self, prompts: Sequence[str]) -> Iterator[Condition]:
        for start in range(0, len(prompts), self.batch_size):
            yield self.adapter.encode(list(prompts[start : start + self.batch_size]))
