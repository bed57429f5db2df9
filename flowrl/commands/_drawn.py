"""What `flowrl sample` says of each file that it draws, and the name that follows from it.

A file is named `<prompt>-<sample>-<mark>`: two numbers of the call, and eight digits of a hash over all that decides
the picture: prompt, pictures, seed, model, adapter, steps, guidance and all other arguments. So nothing is overwritten
but by the same call, which draws the same again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the pictures of a call come from."""

    model: str
    """Model folder, hub id or asset; of a run its `model.path`."""
    run: str | None
    """Folder, where the weights are a run's."""
    version: str | None
    """Hash of the model folder's file names, sizes and times; None for a hub id."""
    adapter: str | None
    """Hash of a run's trained weights."""
    steps: int | None
    guidance: float | None
    arguments: dict[str, Any]
    """Of the pipeline's call, as far as they were set."""

    def provenance(self, prompt: str, images: Sequence[str], seed: int) -> dict[str, Any]:
        """Of one file, plain data; `images` are paths."""
        return {
            "prompt": prompt,
            "seed": seed,
            "model": self.model,
            "run": self.run,
            "model_files": self.version,
            "adapter": self.adapter,
            "steps": self.steps,
            "guidance": self.guidance,
            "arguments": self.arguments,
            "images": [{"file": Path(path).name, "sha256": _content(Path(path)).hexdigest()} for path in images],
        }


def stem(number: int, sample: int, told: dict[str, Any]) -> str:
    """Name of a file without its suffix.

    >>> stem(3, 0, {"prompt": "a red circle"})
    '00003-0-79564736'
    """
    mark = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return f"{number:05d}-{sample}-{mark}"


def origin(model: str, pipeline: Any, call: dict[str, Any], guidance: float | None) -> Origin:
    """Of a call.

    Args:
        model: run folder, model folder, hub id or embedded asset.
        pipeline: made of it.
        call: arguments of the pipeline's call.
        guidance: as asked for; None: the call's, else the pipeline's default.
    """
    from flowrl.config.retired import run_tree
    from flowrl.models.classes import config_folder

    folder = Path(model)
    is_run = (folder / "config.yaml").is_file()
    path = str(run_tree(folder)["model"]["path"]) if is_run else model
    local = config_folder(path)
    here = local is not None and (local / "model_index.json").is_file()
    if guidance is None:
        scales = [_argument(pipeline, call, name) for name in ("guidance_scale", "true_cfg_scale")]
        guidance = next((scale for scale in scales if scale is not None), None)
    return Origin(
        model=path,
        run=model if is_run else None,
        version=_version(local) if local is not None and here else None,
        adapter=_adapter(folder / "adapter") if is_run else None,
        steps=_argument(pipeline, call, "num_inference_steps"),
        guidance=guidance,
        arguments={name: _plain(value) for name, value in call.items()},
    )


def _argument(pipeline: Any, call: dict[str, Any], name: str) -> Any:
    """As set, else the default of the pipeline's call; None where it has none."""
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


def _adapter(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        digest.update(f"{file.relative_to(folder)} {_content(file).hexdigest()}\n".encode())
    return digest.hexdigest()


def _content(file: Path) -> Any:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(_BLOCK), b""):
            digest.update(block)
    return digest
