"""The adapter of a model without a name: the native one of its pipeline's class, else the generic one.

A native module declares `PIPELINE`, its class, and `takes(part)`, whether it can take a checkpoint of that class. Only
JSON is read: model_index.json, and for a class with a native adapter the configurations of its components. For a hub
id that is not embedded they are downloaded, a few kilobytes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core import registry
from flowrl.core.assets import asset_roots
from flowrl.core.errors import ModelError
from flowrl.models.pipelines.paths import asset_folder, loading, require_folder, resolve_path

GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Choice:
    """The adapter of a model, and the reason for it."""

    name: str
    reason: str


def config_folder(path: str) -> Path | None:
    """Local folder with a model's JSON files: an asset, a pipeline folder, or the embedded files of a hub id."""
    asset, local = asset_folder(path), Path(path).expanduser()
    if asset is not None:
        return asset
    if (local / "model_index.json").is_file():
        return local
    for root in asset_roots():
        index = root / "model_configs" / "index.json"
        known = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
        if path in known:
            return index.parent / known[path]
    return None


def natives() -> dict[str, str]:
    """Pipeline class -> native adapter."""
    modules = {name: registry.load("models", name) for name in registry.names("models") if name != GENERIC}
    return {module.PIPELINE: name for name, module in modules.items()}


def choose(path: str, revision: str | None = None, *, offline: bool = False) -> Choice:
    """The adapter for `model.path`; `offline` reads the local cache of the hub alone.

    Raises ModelError: a path that does not exist, not a pipeline folder, a single file, or a hub id out of reach.
    """
    read = _reader(path, revision, offline=offline)
    kind = _class_name(read)
    native = natives().get(kind)
    if native is None:
        return Choice(GENERIC, f"{kind} has no native adapter")

    def part(name: str) -> dict[str, Any]:
        return read(f"{name}/{'scheduler_config' if name == 'scheduler' else 'config'}.json")

    if registry.load("models", native).takes(part):
        return Choice(native, f"{kind} is its class")
    return Choice(GENERIC, f"{native}, the native adapter of {kind}, cannot take this checkpoint")


def pipeline_class(path: str, revision: str | None = None, *, offline: bool = False) -> str:
    """Name of the pipeline's class of `model.path`; `offline` and errors as in `choose`."""
    return _class_name(_reader(path, revision, offline=offline))


def _class_name(read: Callable[[str], dict[str, Any]]) -> str:
    kind = read("model_index.json").get("_class_name")
    # A pipeline with code of its own names its module too.
    return str(kind[-1] if isinstance(kind, list) and kind else kind)


def _reader(path: str, revision: str | None, *, offline: bool) -> Callable[[str], dict[str, Any]]:
    """Reads a JSON file of the model by its name in the repository."""
    folder, place = config_folder(path), Path(resolve_path(path))
    if folder is None and place.suffix == ".safetensors":
        raise ModelError(
            f"model.path={path!r} is a single file, which does not name its pipeline; set model.name to one of "
            f"{', '.join(sorted(natives().values()))}"
        )
    if folder is None:
        require_folder(path)

    def read(name: str) -> dict[str, Any]:
        file = folder / name if folder is not None else _download(path, name, revision, offline=offline)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path={path!r}: its {name} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"model.path={path!r}: its {name} holds no JSON object")
        return values

    return read


def _download(path: str, name: str, revision: str | None, *, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    why = f"model.name is left out, so the pipeline's class is read from the hub's {name}"
    try:
        with loading("model.path", path):
            if not offline:
                return Path(hf_hub_download(path, name, revision=revision))
            # hf_hub_download(local_files_only=True) sends a request all the same, for its user agent.
            file = try_to_load_from_cache(path, name, revision=revision)
            if not isinstance(file, str):
                raise LocalEntryNotFoundError(name)
            return Path(file)
    except ModelError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            hub = "a plan sends no request to the hub" if offline else "the hub cannot be reached"
            reason = f"model.path={path!r}: {hub}, and {name} is not in its local cache"
        elif isinstance(error.__cause__, EntryNotFoundError):
            reason = f"model.path={path!r}: the hub's repository has no {name}"
        else:
            reason = str(error)
        adapters = ", ".join(registry.names("models"))
        raise ModelError(f"{reason}. {why}; set model.name to one of {adapters} ({GENERIC} takes any class)") from error
