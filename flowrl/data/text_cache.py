"""Embeddings of prompts and their images, made once or on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flowrl.core.media import open_image
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt, identity
from flowrl.models.base import ModelAdapter


class Texts:
    """Embeddings of prompts and their images: all made once and the encoders freed, or made on demand.

    The cache is in host memory, since thousands of long prompts take more than a denoiser; `lookup` copies those of
    an iteration to the device.
    """

    def __init__(
        self, adapter: ModelAdapter, prompts: Sequence[str | Prompt], *, cache: bool, batch_size: int = 64
    ) -> None:
        self.adapter, self.batch_size = adapter, batch_size
        self.rows: dict[tuple[str, tuple[str, ...]], int] = {}
        self.table: Condition | None = None
        if cache:
            unique = list(dict.fromkeys(identity(prompt) for prompt in prompts))
            parts = self._batches(unique)
            first = next(iter(parts))
            self.device = first.device
            self.table = Condition.collate([first.to("cpu"), *(part.to("cpu") for part in parts)])
            self.rows = {key: row for row, key in enumerate(unique)}
            adapter.free_text_encoders()

    def lookup(self, prompts: Sequence[str | Prompt]) -> Condition:
        """Conditions of P prompts in order; a text is a prompt without images."""
        wanted = [identity(prompt) for prompt in prompts]
        if self.table is None:
            return Condition.collate(list(self._batches(wanted)))
        return self.table.index(torch.tensor([self.rows[key] for key in wanted])).to(self.device)

    def _batches(self, wanted: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[Condition]:
        for start in range(0, len(wanted), self.batch_size):
            part = wanted[start : start + self.batch_size]
            texts = [text for text, _ in part]
            if not any(files for _, files in part):
                yield self.adapter.encode(texts)
                continue
            encode: Any = self.adapter.encode  # with images, for adapters that declare image_limits
            yield encode(texts, [[open_image(file) for file in files] for _, files in part])
