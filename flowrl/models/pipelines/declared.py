"""What a model's index files say of its distillation (models/pipelines/distilled.py), before it is loaded and after."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.core.files import known_object
from flowrl.display.console import log
from flowrl.models.pipelines.classes import config_folder
from flowrl.models.pipelines.distilled import INDICES, Distilled, Said, by_index, found

_NAMES = re.compile("turbo|schnell|lightning|distill", re.IGNORECASE)


def of_pipeline(pipeline: Any, said: Said | None = None, revision: str | None = None) -> Distilled | None:
    """How a loaded pipeline was distilled; None: it was not, as far as it says. Its name alone is told as a warning.
    `said` is the option `model.distilled`, `revision` that of a hub id. Raises ModelError: its index has a kind or
    noise levels that cannot be.
    """
    place, parts = str(pipeline.config.get("_name_or_path") or ""), pipeline.components
    network = next((parts[name].config for name in ("transformer", "unet") if parts.get(name) is not None), {})
    own = parts.get("scheduler")
    scheduler = {} if own is None else {**own.config, "_class_name": type(own).__name__}
    index = {**pipeline.config, **index_of(place, revision), "_class_name": type(pipeline).__name__}
    result = found(index, scheduler, network, said)
    if result is None and said is None:
        _tell(Path(place).name)
    return result


def declared(path: str, revision: str | None = None, said: Said | None = None) -> Distilled | None:
    """What a model's own index says, before it is loaded and where its files are on this machine; else None."""
    return by_index(index_of(path, revision), said)


def index_of(path: str, revision: str | None = None) -> dict[str, Any]:
    """Entries of the index files of an asset, a folder or a hub id, those that diffusers drops too; {}: not here."""
    folder = config_folder(path) or Path(path).expanduser()
    if folder.is_dir():
        return {key: value for name in INDICES for key, value in known_object(folder / name).items()}
    if path.count("/") != 1 or path.startswith((".", "/", "~")) or path.endswith(".safetensors"):
        return {}
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(path, name, revision=revision) for name in INDICES]
    return {key: value for file in files if isinstance(file, str) for key, value in known_object(Path(file)).items()}


@cache
def _tell(name: str) -> None:
    """Warn, once, about a name that sounds distilled."""
    if _NAMES.search(name):
        log.warning(
            "%s: the name sounds like a distilled model, and its files do not say so; set model.distilled to nodes, "
            "flow_map or consistency if it is one (no CFG, its own steps), else to none",
            name,
        )
