"""Embeddings of prompts and their images, made once or on demand."""

from collections.abc import Sequence
from typing import Any

import torch

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition, Identity
from flowrl.data.prompts import Prompt, identity, open_named
from flowrl.data.text_files import TextFiles
from flowrl.models.base import ModelAdapter
from flowrl.models.weights.whole import spoiled_weights

BATCH = 64
"""Prompts that are encoded together."""


class Texts:
    """Embeddings of prompts and their images: all made once and the encoders freed, or made on demand.

    The cache is in host memory, or in files that are mapped into it, since thousands of long prompts take more than a
    denoiser; `lookup` copies those of an iteration to the device.

    `cache`: make them all now; False: when they are looked up. `batch_size` prompts are encoded together. `files` hold
    the prompts; None: memory does. `free`: free the encoders once all are made.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        prompts: Sequence[str | Prompt],
        *,
        cache: bool,
        batch_size: int = BATCH,
        files: TextFiles | None = None,
        free: bool = True,
    ) -> None:
        self.adapter, self.batch_size, self.files = adapter, batch_size, files
        self.rows: dict[Identity, int] = {}
        self.table: Condition | None = None
        if files is not None:
            self.device = files.device
            files.load()
        elif cache:
            unique = batches(prompts, batch_size)
            parts = (encoded(adapter, part) for part in unique)
            first = next(parts)
            self.device = first.device
            self.table = Condition.collate([first.to("cpu"), *(part.to("cpu") for part in parts)])
            self.rows = {key: row for row, key in enumerate(key for part in unique for key in part)}
        if cache and free:
            adapter.free_text_encoders()

    @classmethod
    def of(cls, adapter: ModelAdapter, prompts: Sequence[Prompt], table: Condition, device: torch.device) -> "Texts":
        """The embeddings of P prompts that were made already; `table` has a row for each, in order."""
        result = cls(adapter, (), cache=False)
        result.table, result.device = table.to("cpu"), device
        result.rows = {identity(prompt): row for row, prompt in enumerate(prompts)}
        return result

    @property
    def ready(self) -> bool:
        """All embeddings were made beforehand, so that `lookup` runs no encoder."""
        return self.files is not None or self.table is not None

    def knows(self, prompt: str | Prompt) -> bool:
        """Whether `lookup` has the embeddings of a prompt, or can make them."""
        if self.files is not None:
            return self.files.holds(identity(prompt))
        return self.table is None or identity(prompt) in self.rows

    def lookup(self, prompts: Sequence[str | Prompt]) -> Condition:
        """Conditions of P prompts in order; a text is a prompt without images."""
        return self.of_identities([identity(prompt) for prompt in prompts])

    def of_identities(self, wanted: Sequence[Identity]) -> Condition:
        """Conditions of P prompts that are known by text and images alone, such as those of an earlier iteration."""
        if self.files is not None:
            return self.files.lookup(wanted).to(self.device)
        if self.table is not None:
            return self.table.index(torch.tensor([self.rows[key] for key in wanted])).to(self.device)
        starts = range(0, len(wanted), self.batch_size)
        return Condition.collate([encoded(self.adapter, wanted[k : k + self.batch_size]) for k in starts])


def batches(prompts: Sequence[str | Prompt], batch_size: int = BATCH) -> list[list[Identity]]:
    """The distinct prompts in order, as many as are encoded together in each."""
    unique = list(dict.fromkeys(identity(prompt) for prompt in prompts))
    return [unique[k : k + batch_size] for k in range(0, len(unique), batch_size)]


def encoded(adapter: ModelAdapter, prompts: Sequence[Identity]) -> Condition:
    """Conditions of prompts on the adapter's device. Raises ModelError: not finite, and nor are the model's weights."""
    texts = [text for text, _ in prompts]
    encode: Any = adapter.encode  # with images, for adapters that declare image_limits
    images = [[open_named(file) for file in files] for _, files in prompts]
    result: Condition = encode(texts, images) if any(files for _, files in prompts) else encode(texts)
    # Now: the text encoders may be freed before an image shows it.
    entries = (entry if isinstance(entry, list) else [entry] for entry in result.tensors.values())
    if adapter.pipeline is not None and not all(bool(v.isfinite().all()) for values in entries for v in values):
        spoiled = spoiled_weights(adapter.pipeline.components.items())
        if spoiled is not None:
            raise ModelError(f"the embeddings of the prompts are NaN or inf: {spoiled}")
    return result
