"""Where a model is: on this machine, on the hub and accessible, or neither. For `flowrl doctor`; reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.core.errors import ModelError
from flowrl.models.pipelines.paths import require_folder, resolve_path

if TYPE_CHECKING:
    from flowrl.models.base import ModelConfig

_WEIGHTS = ("*.safetensors", "*.bin")
_INDEX = "model_index.json"


def place_of(config: ModelConfig) -> str:
    """The model's place, in words. Raises ModelError: not there, gated, private, or lacks weights; with the remedy."""
    path = resolve_path(config.path)
    if path.endswith(".safetensors"):
        return "a single file that is here"
    if Path(path).is_dir():
        require_folder(config.path)
        _require_weights(Path(path), f"model.path={config.path!r}")
        return "here, with weights for every part"
    return _on_hub(config.path, config.revision)


def _require_weights(folder: Path, what: str) -> None:
    """Raise ModelError if a network of the pipeline has a configuration and no weights."""
    for part in sorted(folder.iterdir()):
        # Schedulers, tokenizers and processors have no config.json.
        if (part / "config.json").is_file() and not any(any(part.glob(kind)) for kind in _WEIGHTS):
            raise ModelError(f"{what} is here in part: {part.name} has no weights; copy or download the whole pipeline")


def _on_hub(path: str, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    name = f"model.path={path!r}"
    try:
        # The smallest file of a pipeline: access to it is access to all.
        file = Path(hf_hub_download(path, _INDEX, revision=revision, force_download=True))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = _hub_fault(name, revision, error)
        cached = None if reason else try_to_load_from_cache(path, _INDEX, revision=revision)
        if not isinstance(cached, str):
            raise ModelError(
                reason
                or f"{name} is not here, and the hub cannot be reached ({_short(error)}): connect "
                "to the network, unset HF_HUB_OFFLINE, or give a folder that is here"
            ) from error
        _require_weights(Path(cached).parent, name)
        return "in the hub's cache here; the hub cannot be reached"
    if any(file.parent.rglob("*.safetensors")):
        return "on the hub and open to you; weights of it are in the cache here"
    return "on the hub and open to you; not downloaded yet"


def _hub_fault(name: str, revision: str | None, error: BaseException) -> str | None:
    """Meaning of the hub's answer, with the remedy; None if there was no answer."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated, and you have no access: accept its licence on its hub page, then run 'hf auth login'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name}: the hub has no such repository, or it is private: check the spelling, or run 'hf auth login'"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: name a branch, tag or commit of it in model.revision"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return None  # a subclass of EntryNotFoundError that means no answer
    if isinstance(error, errors.EntryNotFoundError):
        return f"{name}: the repository has no {_INDEX}, so it is not a diffusers pipeline; name one that is"
    if isinstance(error, errors.HFValidationError):
        return f"{name} is not a hub id ({_short(error)}); one looks like 'owner/name'"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status == 401:
        return f"{name}: the hub refuses your token (401): run 'hf auth login' with a valid one"
    if status == 403:
        return f"{name}: the hub forbids access to your token (403): give the token the right to read it"
    return None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
