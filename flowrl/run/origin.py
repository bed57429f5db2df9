"""Origin of a pipeline's images as plain data: the model, hashes of its weights, and the arguments of its call."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from flowrl.config.load import run_tree
from flowrl.core.files import file_sha256
from flowrl.models.pipelines.classes import config_folder


def origin(model: str, pipeline: Any, call: dict[str, Any], guidance: float | None) -> dict[str, Any]:
    """Plain data of a call: model and weights, steps, guidance and the other arguments that were set.

    `model` is the path (of a run its `model.path`), `run` the run folder or null, `model_files` a hash of the model
    folder's file names, sizes and times (null for a hub id), `adapter` a hash of a run's trained weights. `call` has
    the arguments of the pipeline's call. `guidance`: that of the command line; None: the call's, else the pipeline's
    default.
    """
    folder = Path(model)
    is_run = (folder / "config.yaml").is_file()
    path = str(run_tree(folder)["model"]["path"]) if is_run else model
    local = config_folder(path)
    here = local is not None and (local / "model_index.json").is_file()
    if guidance is None:
        scales = [_argument(pipeline, call, name) for name in ("guidance_scale", "true_cfg_scale")]
        guidance = next((scale for scale in scales if scale is not None), None)
    return {
        "model": path,
        "run": model if is_run else None,
        "model_files": _version(local) if local is not None and here else None,
        "adapter": weights_hash(folder / "adapter") if is_run else None,
        "steps": _argument(pipeline, call, "num_inference_steps"),
        "guidance": guidance,
        "arguments": {name: _plain(value) for name, value in call.items()},
    }


def _argument(pipeline: Any, call: dict[str, Any], name: str) -> Any:
    """Value of an argument: that of `call`, else the default of the pipeline's call, else None."""
    known = inspect.signature(type(pipeline).__call__).parameters
    default = known[name].default if name in known else None
    return call.get(name, None if default is inspect.Parameter.empty else default)


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _version(folder: Path) -> str:
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    lines = [f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def weights_hash(folder: Path) -> str:
    """Hash of a run's trained weights, in its folder `adapter`."""
    files = sorted(folder.rglob("*.safetensors"))
    lines = [f"{file.relative_to(folder)} {file_sha256(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
