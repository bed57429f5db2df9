"""A model without its weights: its adapter on the meta device, from JSON files alone."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.models.memory.savings import require_known
from flowrl.models.pipelines.classes import config_folder
from flowrl.models.pipelines.paths import loading


class UnknownModel(ValueError):
    """A model of which nothing is known before it is downloaded."""


def locate(path: str) -> Path:
    """Folder with a model's JSON files: an embedded asset, a local folder, or what is embedded for a hub id.

    Raises UnknownModel: the files are not on this machine.
    """
    folder = config_folder(path)
    if folder is not None:
        return folder
    raise UnknownModel(
        f"model.path={path!r}: its configuration is not embedded, so schedule and memory are not known before the "
        "model is downloaded; give a folder that holds it"
    )


def skeleton(name: str, module: ModuleType, config: Any) -> Any:
    """The adapter of a family and its options on the meta device; `name` is `model.name`, for messages.

    Raises UnknownModel: its JSON files are not on this machine, or its family cannot be built without weights.
    """
    make = getattr(module, "skeleton", None)
    if make is None:
        raise UnknownModel(f"model.name={name!r} cannot be measured without its weights")
    folder = locate(config.path)
    if config.attention is not None:
        require_known(config.attention)
    # A plan asks for no kernels: attention is counted as a fused one. `auto` is decided by what updates take without.
    plain = dataclasses.replace(config, attention=None)
    if plain.gradient_checkpointing == "auto":
        plain = dataclasses.replace(plain, gradient_checkpointing=False)
    with loading("model.path", config.path):
        return make(plain, folder)
