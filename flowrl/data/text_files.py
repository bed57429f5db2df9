"""Embeddings of prompts in files, which all processes and later runs map into memory.

A file holds the prompts that were encoded together, so its rows have the bits of a run without files. Its name is the
SHA-256 of all that decides them: the prompts in order and the text encoders (text_identity.py). So a file never
changes, runs may share a folder, and two that write a file at once write the same. A file is written under another name
and renamed. It is safetensors, with the SHA-256 of its contents in the header; a damaged one is made again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.files import replaced
from flowrl.core.types import Condition, Identity
from flowrl.data.options import DataConfig
from flowrl.data.text_identity import digest
from flowrl.display.console import log
from flowrl.models.base import ModelAdapter

IN_MEMORY = 2**30
"""Bytes of embeddings up to which every process holds them itself, where `data.text_cache` is null."""
FOLDER = ".text_cache"
"""Name of the folder in `output` where they are more."""
_FORMAT = "flowrl embeddings 1"


def text_folder(data: DataConfig, output: str, size: int | None, *, images: bool) -> Path | None:
    """The folder of a run's embeddings; None: every process holds them in memory, or they are made on demand.

    `size`: bytes of the embeddings of all prompts; None: not known, since the adapter has no pipeline. `images`: some
    prompts have images; their embeddings depend on what the adapter has seen before.

    Raises ConfigError: `data.text_cache` is a folder, and these embeddings cannot be kept.
    """
    chosen = data.text_cache
    if chosen == "memory" or not data.caches_text:
        return None
    if chosen is None:
        return Path(output) / FOLDER if size is not None and size > IN_MEMORY and not images else None
    if size is None or images:
        reason = "prompts with images have embeddings" if images else "an adapter without a pipeline has text encoders"
        raise ConfigError(
            f"data.text_cache={chosen!r}: {reason} that a file cannot be told by", {"data.text_cache": "memory"}
        )
    return Path(chosen)


class TextFiles:
    """The files of a list of prompts.

    The folder is made if it is missing. `encoders`: `text_identity` of the adapter; `batches`: prompts that are encoded
    together, file by file, each once; `encode`: embeddings of a batch. The adapter's `unconditional`, which its first
    `encode` makes and which is on `device`, has a file of its own.
    """

    def __init__(
        self,
        folder: Path,
        encoders: str,
        batches: Sequence[Sequence[Identity]],
        adapter: ModelAdapter,
        encode: Callable[[Sequence[Identity]], Condition],
        device: torch.device,
    ) -> None:
        self.folder, self.batches, self.adapter, self.encode, self.device = folder, batches, adapter, encode, device
        self.files = [self._file(json.dumps([encoders, batch])) for batch in batches]
        self.unconditional = self._file(json.dumps([encoders, "unconditional"]))
        self.places = {key: (k, row) for k, batch in enumerate(batches) for row, key in enumerate(batch)}
        self.parts: list[Condition] = []

    def __len__(self) -> int:
        return len(self.files)

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(f'{_FORMAT} {key}'.encode()).hexdigest()}.safetensors"

    def missing(self) -> list[int]:
        """Numbers of the files that are not there, as where a folder is one machine's own."""
        return [number for number, file in enumerate(self.files) if not file.is_file()]

    def make(self, numbers: Iterable[int]) -> int:
        """Encode the batches of these numbers whose files are missing or damaged; the number of those.

        Raises WriteError: the disk is full or not writable.
        """
        made = 0
        for number in numbers:
            file, batch = self.files[number], self.batches[number]
            if not _sound(file):
                _write(file, self.encode(batch).to("cpu").tensors)
                made += 1
            if number == 0 and not _sound(self.unconditional):
                if self.adapter.unconditional is None:
                    self.encode(batch[:1])
                away = self.adapter.unconditional
                _write(self.unconditional, {} if away is None else away.to("cpu").tensors)
        return made

    def load(self) -> None:
        """Map all files into memory; nothing is read before it is looked up."""
        self.parts = [Condition(_read(file)) for file in self.files]
        if self.unconditional.is_file() and (away := _read(self.unconditional)):
            self.adapter.unconditional = Condition(away).to(self.device)

    def holds(self, key: Identity) -> bool:
        """Whether a prompt is among those of the files."""
        return key in self.places

    def lookup(self, wanted: Sequence[Identity]) -> Condition:
        """Conditions of P prompts in order, on the CPU."""
        places = [self.places[key] for key in wanted]
        return Condition.collate([self.parts[number].index(torch.tensor([row])) for number, row in places])


def _sound(file: Path) -> bool:
    """Whether a file is there and whole; reads all of it."""
    if not file.is_file():
        return False
    try:
        _read(file, whole=True)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        log.warning("the embeddings in %s are damaged (%s) and are made again", file, str(error).splitlines()[0])
        return False
    return True


def _read(file: Path, *, whole: bool = False) -> dict[str, Tensor | list[Tensor]]:
    """A file's entries, mapped into memory. Raises ValueError: another format, or, with `whole`, other contents."""
    with safe_open(file, framework="pt") as source:
        about = source.metadata() or {}
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118, it is no dict
    if about.get("format") != _FORMAT:
        raise ValueError(f"its format is {about.get('format')!r}, not {_FORMAT!r}")
    if whole and digest(tensors) != about["sha256"]:
        raise ValueError("its contents do not have their SHA-256")
    lengths: dict[str, list[int]] = json.loads(about["lengths"])
    return {name: list(value.split(lengths[name])) if name in lengths else value for name, value in tensors.items()}


def _write(file: Path, entries: dict[str, Tensor | list[Tensor]]) -> None:
    """Write the entries of a Condition; rows of different lengths one after the other."""
    lengths = {name: [len(row) for row in value] for name, value in entries.items() if isinstance(value, list)}
    tensors = {
        name: torch.cat(value) if isinstance(value, list) else value.contiguous() for name, value in entries.items()
    }
    about = {"format": _FORMAT, "sha256": digest(tensors), "lengths": json.dumps(lengths)}
    with replaced(file, "the files of other prompts are safe") as temporary:
        save_file(tensors, temporary, metadata=about)
