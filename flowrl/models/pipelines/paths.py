"""A model's path: an embedded asset, a folder, a single file or a hub id; and the reasons why it cannot be loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.core import assets
from flowrl.core.errors import ModelError, Remedy
from flowrl.core.paths import lost, lost_in
from flowrl.models.lora_formats.files import PICKLES
from flowrl.models.pipelines.distilled import without_warnings_of_entries


def asset_folder(name: str) -> Path | None:
    """Folder of an embedded pipeline, or None."""
    return assets.asset_folder(name, "model_index.json")


def resolve_path(path: str) -> str:
    """A path as diffusers wants it: the folder of an asset, an existing local path, or the hub id itself.

    Raises ModelError: a local path that does not exist, or a pickle.
    """
    asset = asset_folder(path)
    if asset is not None:
        return str(asset)
    local = Path(path).expanduser()
    if local.suffix in PICKLES:
        raise ModelError(f"model.path={path!r}: pickle checkpoints are not read; convert it to .safetensors")
    if local.exists():
        return str(local)
    if path.startswith((".", "/", "~")) or local.suffix == ".safetensors" or path.count("/") != 1:
        raise ModelError(
            f"model.path={path!r}: no such file, folder or embedded asset; a hub id looks like 'owner/name'"
        )
    folder = lost_in(path)
    if folder is not None:
        raise ModelError(f"model.path={path!r}: {lost(folder)}")
    return path


def lacks(kind: str, component: str) -> str:
    """Why a pipeline with a null component is refused."""
    return (
        f"{kind} needs its component {component!r}, which this model leaves out (null in model_index.json); give a "
        "complete pipeline folder"
    )


def pipeline_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a folder; empty without one."""
    file = folder / "model_index.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def require_folder(path: str, kind: str | None = None) -> None:
    """Raise ModelError where a local path is not a whole pipeline, or not one of class `kind`.

    Hub ids and single files pass.
    """
    folder = Path(resolve_path(path))
    if not folder.exists() or folder.suffix == ".safetensors":
        return
    try:
        parts = pipeline_index(folder)
    except ValueError as error:
        raise ModelError(f"model.path={path!r}: its model_index.json cannot be read: {error}") from None
    if not parts:
        raise ModelError(
            f"model.path={path!r} is not a pipeline folder: it has no model_index.json; give the folder that "
            "save_pretrained() of a pipeline wrote, or a hub id"
        )
    listed = [name for name, value in parts.items() if isinstance(value, list) and len(value) == 2 and value[0]]
    missing = [name for name in listed if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"model.path={path!r}: its model_index.json names {missing[0]!r}, but there is no folder "
            f"{missing[0]!r}; copy the whole pipeline"
        )
    if kind is not None and parts.get("_class_name") != kind:
        raise ModelError(
            f"model.path={path!r} is a {parts.get('_class_name')}, and this adapter is for {kind}",
            Remedy(without="model.name"),
        )


def null_components(path: str) -> dict[str, None]:
    """Components that a local folder's model_index.json declares null; diffusers takes them as explicit arguments."""
    return {name: None for name, value in pipeline_index(Path(path)).items() if value == [None, None]}


@contextmanager
def loading(key: str, path: str) -> Iterator[None]:
    """Turn the errors of a hub, a folder or a file into one ModelError that names the key and the remedy."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from safetensors import SafetensorError

    from flowrl.models.weights.whole import whole_weights

    try:
        with whole_weights(), without_warnings_of_entries():
            yield
    except ModelError:
        raise
    except (HfHubHTTPError, OSError, ValueError, SafetensorError) as error:
        # diffusers wraps the hub's own errors in OSError: the reason is further down the chain.
        chain: list[BaseException] = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(below)
        if any(isinstance(e, GatedRepoError) for e in chain):
            text = f"{key}={path!r} is gated: accept its licence on its hub page, then run 'hf auth login'"
        elif any(isinstance(e, RepositoryNotFoundError) for e in chain):
            text = (
                f"{key}={path!r}: the hub has no such repository, or it is private: check the spelling, "
                "or run 'hf auth login'"
            )
        else:
            reason = (str(error).splitlines() or [""])[0]
            text = (
                f"{key}={path!r} could not be loaded ({type(error).__name__}: {reason}); "
                "without a network, give a folder that is already here or an embedded asset such as tiny-sd3"
            )
        raise ModelError(text) from error
