"""Scores that are known already: by the exact image, the prompt, its record, and what scores them.

A sample's key is a SHA-256 over the pixels with their shape and dtype, the prompt, the whole metadata record, and the
scorer's fingerprint (name, version, options). NaN is never kept, so a failure is tried again the next time.
"""

import hashlib
import json
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.core.files import loads

FORMAT = 1
ENTRIES = 65_536
"""Samples that the memory holds; the one that was not used for longest goes first."""


class Memory:
    """The newest scores of this process."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self.table: OrderedDict[str, dict[str, float]] = OrderedDict()

    def get(self, key: str) -> dict[str, float] | None:
        if key in self.table:
            self.table.move_to_end(key)
        return self.table.get(key)

    def put(self, key: str, scores: Mapping[str, float]) -> None:
        self.table[key] = dict(scores)
        self.table.move_to_end(key)
        while len(self.table) > self.entries:
            self.table.popitem(last=False)


class Folder:
    """One small JSON file a sample, for any number of processes and runs; it grows until someone deletes it.

    A file is written under a name of its own and then renamed, so a reader finds a whole one or none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _file(self, key: str) -> Path:
        return self.path / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, float] | None:
        try:
            result = loads(self._file(key).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not there, or torn by a machine that went down: score it again
            return None
        return result if isinstance(result, dict) else None

    def put(self, key: str, scores: Mapping[str, float]) -> None:
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(scores)))
        os.replace(temporary, file)


Store = Memory | Folder
"""Output name -> value, by key."""


class ScoreCache:
    """Scores of one scorer. `store` keeps them; several scorers may share one, which the configuration names `place`.
    `fingerprint`: whatever tells this scorer from every other, its version and options included. `images`: whether the
    files under metadata["images"] are part of what is scored, as an edit's source is. `prefix`: what the run puts
    before the names of the outputs; the store knows them without.
    """

    def __init__(
        self, store: Store, fingerprint: str, *, place: str = "memory", images: bool = False, prefix: str | None = None
    ) -> None:
        self.store, self.fingerprint, self.place, self.images = store, fingerprint, place, images
        self.prefix = "" if prefix is None else f"{prefix}_"

    def key(self, image: Tensor, prompt: str, record: Mapping) -> str | None:
        """The key of one image [3, H, W] or video [F, 3, H, W].

        None where the record is not plain data, or an image that it names cannot be read, which the reward reports.
        """
        try:
            known = json.dumps([FORMAT, self.fingerprint, prompt, dict(record)], sort_keys=True)
        except (TypeError, ValueError):
            return None
        digest = hashlib.sha256(known.encode())
        pixels = image.detach().cpu().contiguous()
        digest.update(f"{pixels.dtype} {list(pixels.shape)}".encode())
        digest.update(pixels.view(torch.uint8).numpy().tobytes())
        try:
            for file in record.get("images", ()) if self.images else ():
                digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
        except (OSError, TypeError):
            return None
        return digest.hexdigest()

    def get(self, key: str | None, outputs: Sequence[str]) -> dict[str, float] | None:
        """The scores under a key, or None; a file that does not hold a number for each output is none."""
        kept = None if key is None else self.store.get(key)
        result = None if kept is None else {f"{self.prefix}{name}": value for name, value in kept.items()}
        if result is None or set(result) != set(outputs):
            return None
        numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in result.values())
        return result if numbers else None

    def put(self, key: str | None, scores: Mapping[str, float]) -> None:
        """Keep the scores of a sample, unless one of them is missing."""
        if key is not None and all(math.isfinite(value) for value in scores.values()):
            self.store.put(key, {name.removeprefix(self.prefix): value for name, value in scores.items()})
