"""LoRA files in diffusers' layout, and where the files of several experts lie."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

PICKLES = {".bin", ".ckpt", ".pt", ".pth"}
"""Endings of files that are not read."""


def lora_file(path: Path) -> Path:
    """The weights of a saved LoRA: the file itself; in a folder diffusers' name, or PEFT's where it alone is there."""
    if not path.is_dir():
        return path
    own, peft = path / "pytorch_lora_weights.safetensors", path / "adapter_model.safetensors"
    return peft if peft.is_file() and not own.is_file() else own


def component_names(network: nn.Module) -> dict[str, nn.Module]:
    """Denoisers by component name: one, or the experts of a ModuleDict."""
    if isinstance(network, nn.ModuleDict):
        return dict(network.items())
    return {"unet" if "UNet" in type(network).__name__ else "transformer": network}


def lora_places(path: Path, components: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, Path]]:
    """(name inside the file, network, folder or file) of each denoiser.

    diffusers has one LoRA file per expert, each under the name `transformer`: the first in `path`, others in their own
    folders, for `load_lora_weights(path / "transformer_2", load_into_transformer_2=True)`.
    """
    for number, (name, network) in enumerate(components.items()):
        yield (name, network, path) if number == 0 else ("transformer", network, path / name)


def read_lora(file: Path, component: str = "transformer") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(denoiser tensors by module, LoRA settings) of a file in diffusers' layout; settings may be empty."""
    prefix = f"{component}."
    with safe_open(file, framework="pt") as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118, it is no dict
        packed = (source.metadata() or {}).get("lora_adapter_metadata", "{}")
    settings = {key.removeprefix(prefix): value for key, value in json.loads(packed).items() if key.startswith(prefix)}
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}, settings
