"""The text encoders of a run's model once more, for a prompt that comes after they were freed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from flowrl.core.errors import ModelError
from flowrl.display.console import log
from flowrl.display.units import size
from flowrl.models.base import ModelAdapter, ModelConfig, torch_dtype
from flowrl.models.memory.host_memory import available_bytes
from flowrl.models.memory.savings import give_memory_back, offload
from flowrl.models.pipelines.paths import loading, resolve_path

_ROOM = 1.25
"""Free memory that is asked for, over the weights of the encoders: for the activations of a few prompts."""


@contextmanager
def borrowed_encoders(adapter: ModelAdapter, config: ModelConfig) -> Iterator[None]:
    """The adapter can encode inside of it, and has freed its text encoders again afterwards.

    Loads the encoders alone, on the run's device. No number of a training depends on it: it draws nothing, and the
    network and the embeddings that are there are left alone.

    Raises ModelError: they cannot be loaded alone, or there is no memory for them.
    """
    started, device = time.perf_counter(), next(adapter.network.parameters()).device
    # Of a local folder, at most; a hub id has none.
    files = Path(resolve_path(config.path)).glob("text_encoder*/*.safetensors")
    _require_room("host memory", available_bytes(), sum(file.stat().st_size for file in files))
    encoders = _loaded(adapter, config)
    weights = sum(tensor.nbytes for part in encoders.values() for tensor in (*part.parameters(), *part.buffers()))
    visiting = device.type != "cpu" and "text_encoders" in config.memory.group_offload
    if device.type == "cuda" and not visiting:
        give_memory_back()
        _require_room(str(device), torch.cuda.mem_get_info(device)[0], weights)
    try:
        for part in encoders.values():
            if visiting:
                offload(part, device)
            else:
                part.to(device)
        adapter.take_text_encoders(encoders)
        yield
    except torch.OutOfMemoryError:
        raise ModelError(f"{device} has no room for the text encoders, {size(weights)}, next to the training") from None
    finally:
        encoders.clear()
        adapter.free_text_encoders()
    log.info("text encoders: %s loaded, used and freed in %.1f s", size(weights), time.perf_counter() - started)


def _loaded(adapter: ModelAdapter, config: ModelConfig) -> dict[str, nn.Module]:
    """The text encoders by the name of the component, in host memory; the other networks are not read."""
    pipeline, path = adapter.pipeline, resolve_path(config.path)
    if pipeline is None or path.endswith(".safetensors"):
        raise ModelError(
            f"model.path={config.path!r}: its text encoders cannot be loaded without the rest of the model"
        )
    parts: dict[str, object] = {}
    for name, part in pipeline.components.items():
        if not name.startswith("text_encoder"):
            parts[name] = None if isinstance(part, nn.Module) else part
        elif pipeline.components.get(name.replace("text_encoder", "tokenizer")) is None:
            parts[name] = None  # left out in the run, too
    with loading("model.path", config.path):
        own = {"revision": config.revision, "variant": config.variant, "dtype": torch_dtype(config.dtype)}
        made = type(pipeline).from_pretrained(path, **own, **parts)
    found = {name: part for name, part in made.components.items() if name.startswith("text_encoder")}
    return {name: part.requires_grad_(False).eval() for name, part in found.items() if isinstance(part, nn.Module)}


def _require_room(place: str, free: int | None, weights: int) -> None:
    """Refuse what does not fit; `free` None: unknown. Raises ModelError: with both numbers."""
    if free is not None and free < _ROOM * weights:
        raise ModelError(
            f"the text encoders need {size(_ROOM * weights)} of {place} next to the training, and {size(free)} are free"
        )
