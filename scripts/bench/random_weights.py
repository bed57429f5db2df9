"""Native adapters of the real shapes with random weights, made on the device: for measurements without a download.

Matrices and convolutions of the denoiser and the VAE are N(0, 0.02); vectors (norms, biases) keep the values that their
classes begin with, so that activations stay of the size that trained networks have. Modules that diffusers keeps in
float32 are float32. There are no text encoders: `encode` gives rows of `condition_shapes()`, the same for the same
text; where texts have lengths of their own, 20 to 60 tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError, Remedy
from flowrl.core.rng import normal
from flowrl.core.types import Condition
from flowrl.models._native import Family, Native
from flowrl.models.base import ModelConfig, torch_dtype
from flowrl.models.memory.savings import check_available
from flowrl.models.pipelines.classes import config_folder
from flowrl.models.weights.roles import component_names

STD = 0.02
"""Standard deviation of the weights."""
SHORTEST, LONGEST = 20, 60
"""Tokens of a prompt where each has a length of its own."""


def randomised(module: ModuleType, device: torch.device) -> ModuleType:
    """The module of a model whose `build` makes random weights on the device instead of loading any."""
    made = ModuleType(module.__name__)
    vars(made).update(vars(module))
    vars(made)["build"] = lambda config: random_adapter(module, config, device)
    return made


def random_adapter(module: ModuleType, config: ModelConfig, device: torch.device, seed: int = 0) -> Native:
    """The adapter of a native family by its options, with random weights.

    Args:
        module: of the family, such as flowrl.models.sd3.
        config: its options; of `path` the JSON files are read.
        device: of the denoiser and the VAE.
        seed: of the weights.

    Raises:
        ModelError: a family that is not native, a model whose configuration is not on this machine, or an option that
            needs the weights of a file.
    """
    family = vars(module).get("FAMILY")
    if not isinstance(family, Family):
        raise ModelError(
            f"model.name={module.__name__.rpartition('.')[2]}: random weights are made for native adapters alone; "
            "use one of those, or the model's own weights"
        )
    folder = config_folder(config.path)
    if folder is None:
        raise ModelError(
            f"model.path={config.path!r}: its configuration is not embedded; give a folder with its JSON files"
        )
    _require_plain(config)
    check_available(config)
    adapter = family.skeleton(config, Path(folder), device)
    generator = torch.Generator(device).manual_seed(seed)
    for network in component_names(adapter.network).values():
        _fill(network, torch_dtype(config.dtype), generator)
    vae: Any = adapter.pipeline.vae
    _fill(vae, vae.dtype, generator)
    _stand_in(adapter)
    return adapter


def _require_plain(config: ModelConfig) -> None:
    wanted = {"memory.quantize": config.memory.quantize, "init_lora": config.init_lora, "vae": config.vae}
    for key, value in wanted.items():
        if value is not None:
            raise ModelError(
                f"model.{key}={value!r} is read from files, and the weights are random here",
                remedies=[Remedy({f"model.{key}": None})],
            )


@torch.no_grad()
def _fill(network: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Draw the matrices of a network of diffusers, and set the types of all parameters."""
    kept = tuple(network._keep_in_fp32_modules or ())
    for name, parameter in network.named_parameters():
        wide = any(f"{part}." in f"{name}." for part in kept)
        parameter.data = parameter.data.to(torch.float32 if wide else dtype)
        if parameter.ndim > 1:
            parameter.normal_(0.0, STD, generator=generator)


def _stand_in(adapter: Native) -> None:
    """Rows of a number's own instead of the text encoders, which are on the meta device."""
    shapes = adapter.condition_shapes()
    adapter.free_text_encoders()

    def texts(prompts: Sequence[str], images: Sequence[Sequence[Any]] | None = None) -> Condition:
        keys = [zlib.crc32(text.encode()) for text in prompts]
        entries: dict[str, Tensor | list[Tensor]] = {}
        for name, shape in shapes.items():
            rows = [normal(_cut(adapter, shape, key), 0, f"random/{name}", [(key,)])[0] for key in keys]
            rows = [row.to(adapter.device, adapter.dtype) for row in rows]
            entries[name] = rows if adapter.ragged else torch.stack(rows)
        return Condition(entries)

    def encode(prompts: Sequence[str], images: Sequence[Sequence[Any]] | None = None) -> Condition:
        if adapter.unconditional is None:
            adapter.unconditional = texts([""])
        return texts(prompts)

    adapter.encode = encode


def _cut(adapter: Native, shape: tuple[int, ...], key: int) -> tuple[int, ...]:
    if not adapter.ragged:
        return shape
    return (min(shape[0], SHORTEST + key % (LONGEST - SHORTEST + 1)), *shape[1:])
