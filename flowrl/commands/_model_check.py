"""Where a model is: on this machine, on the hub and accessible, or neither. For `flowrl doctor`; reads no weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.core.assets import table
from flowrl.core.errors import ModelError
from flowrl.models.pipelines.paths import require_folder, resolve_path

if TYPE_CHECKING:
    from flowrl.models.base import ModelConfig

_WEIGHTS = ("*.safetensors", "*.bin")
_INDEX = "model_index.json"


def place_of(config: "ModelConfig") -> str:
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

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    for kind, meaning in table(Path(__file__).with_name("hub.yaml")).items():
        if kind == status or (isinstance(kind, str) and isinstance(error, vars(errors)[kind])):
            return meaning and meaning.format(name=name, revision=revision, index=_INDEX, error=_short(error))
    return None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
