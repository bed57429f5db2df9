"""The identity of a model's text encoders: equal ones give a text the same embedding."""

import dataclasses
import hashlib
import inspect
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.versions import versions
from flowrl.models.base import ModelAdapter, ModelConfig


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors: names, types, shapes and values; hexadecimal."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        result.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        result.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def text_identity(adapter: ModelAdapter, config: ModelConfig, device: torch.device) -> str:
    """SHA-256 of all that decides the embedding of a text, but for the text; hexadecimal.

    The family and its code, its own options, `dtype`, the weights of every part but the denoiser and the VAE, the
    tokenizers, the versions of the libraries, and the kind of device. The path of the model is not among them.
    The adapter must still have its text encoders; `device` is theirs.
    """
    others = {field.name for field in dataclasses.fields(ModelConfig)} - {"dtype"}
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in others}
    code = hashlib.sha256(Path(inspect.getfile(type(adapter))).read_bytes()).hexdigest()
    parts: dict[str, Any] = {"adapter": type(adapter).__qualname__, "code": code, "options": options}
    parts |= {"versions": versions(), "device": device.type, "components": dict(_components(adapter))}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _components(adapter: ModelAdapter) -> Iterable[tuple[str, Any]]:
    """(name, identity) of every network of the pipeline but the denoiser and the VAE, and of every tokenizer."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    trained = set(map(id, adapter.network.modules()))
    for name, part in adapter.pipeline.components.items():
        if isinstance(part, nn.Module) and name != "vae" and id(part) not in trained:
            settings = part.config.to_dict() if isinstance(part, PreTrainedModel) else {}
            kept = {key: value for key, value in settings.items() if not key.startswith("_")}
            yield name, [type(part).__qualname__, kept, digest(part.state_dict())]
        elif isinstance(part, PreTrainedTokenizerBase | ProcessorMixin):
            with tempfile.TemporaryDirectory() as folder:
                part.save_pretrained(folder)  # files are the only form that all of them have
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                hashes = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
            yield name, [type(part).__qualname__, hashes]
