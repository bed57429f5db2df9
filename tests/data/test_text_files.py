"""Embeddings in files: the bits of those in memory, made by shares, once, and made again where they are damaged."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.core import rng
from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.types import Condition
from flowrl.data.options import DataConfig
from flowrl.data.text_cache import Texts, batches, encoded
from flowrl.data.text_files import FOLDER, IN_MEMORY, TextFiles, text_folder
from flowrl.data.text_identity import text_identity
from flowrl.models.sd3 import Config
from tests import tiny_sd3
from tests.toys import ToyAdapter

PROMPTS = [f"prompt {number}" + " and more" * (number % 3) for number in range(11)]
CPU = torch.device("cpu")


class Encoder(ToyAdapter):
    """A toy whose rows may have lengths of their own, with a mask, and whose first call makes the negative prompt."""

    def __init__(self, ragged: bool) -> None:
        super().__init__()
        self.ragged = ragged

    def encode(self, prompts: Sequence[str]) -> Condition:
        pooled = super().encode(prompts)["prompt"]
        self.unconditional = Condition({"prompt": torch.full((1, 3), 0.25)})
        rows = [rng.normal((len(text), 2), 0, f"rows/{text}", [()])[0].bfloat16() for text in prompts]
        masks = [torch.arange(len(text)) % 2 == 0 for text in prompts]
        return Condition({"prompt": pooled} | ({"rows": rows, "mask": masks} if self.ragged else {}))


def files(folder: Path, adapter: ToyAdapter, encoders: str = "x", prompts: Sequence[str] = PROMPTS) -> TextFiles:
    return TextFiles(folder, encoders, batches(prompts, 4), adapter, partial(encoded, adapter), CPU)


def same(found: Condition, expected: Condition) -> bool:
    if found.tensors.keys() != expected.tensors.keys():
        return False
    pairs = [(found[name], expected[name]) for name in found.tensors]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype for x, y in pairs for a, b in zip(list(x), list(y), strict=True)
    )


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_processes_that_encode_shares_have_the_bits_of_one_that_encodes_all(tmp_path: Path, processes, ragged):
    plain = Texts(Encoder(ragged), PROMPTS, cache=True, batch_size=4)
    adapters = [Encoder(ragged) for _ in range(processes)]
    made = [files(tmp_path, adapter) for adapter in adapters]
    counts = [each.make(range(rank, 3, processes)) for rank, each in enumerate(made)]
    assert sum(counts) == 3
    assert not made[0].missing()
    assert sum(len(adapter.encoded) for adapter in adapters) == 3
    for adapter, each in zip(adapters, made, strict=True):
        texts = Texts(adapter, (), cache=True, files=each)
        assert adapter.freed
        wanted = [PROMPTS[k] for k in (9, 0, 4, 4, 10)]
        assert same(texts.lookup(wanted), plain.lookup(wanted))
        assert adapter.unconditional is not None
        assert torch.equal(adapter.unconditional["prompt"], torch.full((1, 3), 0.25))
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".safetensors"] * 4


def test_a_second_run_encodes_nothing_and_another_text_or_encoder_only_what_is_new(tmp_path: Path):
    files(tmp_path, Encoder(True)).make(range(3))
    again = Encoder(True)
    found = files(tmp_path, again)
    assert found.make(range(3)) == 0
    assert again.encoded == []
    found.load()
    assert again.unconditional is not None
    changed = Encoder(True)
    assert files(tmp_path, changed, prompts=[*PROMPTS[:-1], "other"]).make(range(3)) == 1
    assert changed.encoded == [[*PROMPTS[8:10], "other"]]
    assert files(tmp_path, Encoder(True), "y").make(range(3)) == 3


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def other(file: Path) -> None:
    from safetensors.torch import save_file

    save_file({"prompt": torch.zeros(4, 3)}, file)


@pytest.mark.parametrize("spoil", [cut, flip, empty, other])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_damaged_file_is_made_again_with_a_warning(tmp_path: Path, caplog, ragged, spoil: Callable[[Path], None]):
    first = files(tmp_path, Encoder(ragged))
    first.make(range(3))
    first.load()
    expected = first.lookup([(text, ()) for text in PROMPTS])
    kept = Condition({name: [row.clone() for row in value] for name, value in expected.tensors.items()})
    spoil(first.files[1])
    adapter = Encoder(ragged)
    again = files(tmp_path, adapter)
    with caplog.at_level(logging.WARNING, "flowrl"):
        assert again.make(range(3)) == 1
    assert "damaged" in caplog.text
    assert adapter.encoded == [PROMPTS[4:8]]
    again.load()
    assert same(again.lookup([(text, ()) for text in PROMPTS]), kept)


def test_a_lost_negative_prompt_is_made_again_without_the_texts(tmp_path: Path):
    first = files(tmp_path, Encoder(False))
    first.make(range(3))
    first.unconditional.unlink()
    adapter = Encoder(False)
    assert files(tmp_path, adapter).make(range(3)) == 0
    assert adapter.encoded == [[PROMPTS[0]]]
    assert first.unconditional.is_file()


def test_runs_that_write_a_folder_at_once_leave_whole_files_and_nothing_else(tmp_path: Path):
    with ThreadPoolExecutor(4) as pool:
        runs = [files(tmp_path, Encoder(True)) for _ in range(4)]
        assert all(made <= 3 for made in pool.map(lambda run: run.make(range(3)), runs))
    assert files(tmp_path, Encoder(True)).make(range(3)) == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_full_disk_is_an_error_with_a_remedy_and_leaves_no_part(tmp_path: Path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowrl.core.files.fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        files(tmp_path, Encoder(False)).make(range(3))
    assert not list(tmp_path.iterdir())


# ---- where they are


def data(**options: Any) -> DataConfig:
    return DataConfig(prompts="x.txt", **options)


@pytest.mark.parametrize(
    ("options", "size", "images", "expected"),
    [
        ({}, IN_MEMORY, False, None),
        ({}, IN_MEMORY + 1, False, Path("runs") / FOLDER),
        ({}, IN_MEMORY + 1, True, None),
        ({}, None, False, None),
        ({"text_cache": "memory"}, IN_MEMORY + 1, False, None),
        ({"text_cache": "/texts"}, 1, False, Path("/texts")),
        ({"cache_text": False}, IN_MEMORY + 1, False, None),
    ],
)
def test_many_embeddings_are_in_files_and_few_in_memory(options, size, images, expected):
    assert text_folder(data(**options), "runs", size, images=images) == expected


@pytest.mark.parametrize(("size", "images"), [(None, False), (1, True)])
def test_a_folder_for_embeddings_that_a_file_cannot_be_told_by_is_refused(size, images):
    with pytest.raises(ConfigError, match=r"data\.text_cache='/texts'.*; try data\.text_cache=memory"):
        text_folder(data(text_cache="/texts"), "runs", size, images=images)


@pytest.mark.parametrize("options", [{"text_cache": ""}, {"text_cache": "/texts", "cache_text": False}])
def test_a_folder_without_a_name_or_an_effect_is_refused(options):
    with pytest.raises(ValueError, match="text_cache="):
        data(**options)


# ---- whose they are


def identity(config: Config | None = None, spoil: Callable[[Any], None] = lambda pipe: None) -> str:
    pipe = tiny_sd3.pipeline()
    spoil(pipe)
    config = config or Config(path="tiny", max_sequence_length=tiny_sd3.TOKENS)
    return text_identity(tiny_sd3.Sd3(pipe, config), config, CPU)


def test_encoders_are_told_apart_by_all_that_decides_an_embedding_and_by_nothing_else():
    def nudge(pipe: Any) -> None:
        with torch.no_grad():
            next(pipe.text_encoder_2.parameters()).view(-1)[-1] += 1e-6

    def learn(pipe: Any) -> None:
        pipe.tokenizer.add_tokens(["flowrl"])

    def train(pipe: Any) -> None:
        with torch.no_grad():
            next(pipe.transformer.parameters()).add_(1)
            next(pipe.vae.parameters()).add_(1)

    def made(**options: Any) -> Config:
        return Config(**{"path": "tiny", "max_sequence_length": tiny_sd3.TOKENS} | options)

    own = identity()
    assert identity(spoil=train) == own
    assert identity(made(path="elsewhere", height=32, vae_precision="float32")) == own
    found = [identity(spoil=nudge), identity(spoil=learn), identity(made(max_sequence_length=9))]
    found += [identity(made(load_t5=False)), identity(made(dtype="bfloat16"))]
    assert len({own, *found}) == 6
