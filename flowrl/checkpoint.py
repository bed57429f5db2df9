"""Checkpoints: everything a bitwise resume needs, written atomically, verified when read.

A checkpoint is a folder `iteration-000040` with `state.safetensors`, `state.json` and `manifest.json`
(sizes and SHA-256 of the other two). It is written under a temporary name, fsynced, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

FORMAT = 1
_FILES = ("state.safetensors", "state.json")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or trusted; the message says what is safe and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named tensors and plain data of the end of an iteration."""

    iteration: int
    tensors: dict[str, Tensor]
    state: dict


def path_of(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:06d}"


def available(folder: Path) -> list[int]:
    """Iterations with a finished checkpoint, ascending."""
    if not folder.is_dir():
        return []
    found = [re.fullmatch(r"iteration-(\d{6,})", entry.name) for entry in folder.iterdir()]
    return sorted(int(match.group(1)) for match in found if match)


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint and drop all but the newest `keep`.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    from safetensors.torch import save_file

    target = path_of(folder, checkpoint.iteration)
    temporary = folder / f".{target.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
        save_file(tensors, temporary / "state.safetensors")
        plain = {"format": FORMAT, "iteration": checkpoint.iteration} | checkpoint.state
        (temporary / "state.json").write_text(json.dumps(plain, indent=1))
        manifest = {name: _fingerprint(temporary / name) for name in _FILES}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*_FILES, "manifest.json"):
            _fsync(temporary / name)
        _fsync(temporary)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        _fsync(folder)
    except Exception as error:  # safetensors reports a full disk with an error class of its own
        shutil.rmtree(temporary, ignore_errors=True)
        kept = available(folder)
        safe = f"iteration {kept[-1]} is safe" if kept else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save {target}: {error}; {safe}. Free some space or mend the folder, then go on with --resume"
        ) from error
    for iteration in available(folder)[:-keep]:
        shutil.rmtree(path_of(folder, iteration))
    return target


def load(folder: Path, iteration: int) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
    """
    from safetensors.torch import load_file

    source = path_of(folder, iteration)
    others = [i for i in available(folder) if i < iteration]
    remedy = f"delete {source} to go on from " + (f"iteration {others[-1]}" if others else "the start")
    try:
        manifest = json.loads((source / "manifest.json").read_text())
        for name in _FILES:
            if _fingerprint(source / name) != manifest[name]:
                raise CheckpointError(f"checkpoint {source / name} is truncated or was changed; {remedy}")
        state = json.loads((source / "state.json").read_text())
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {source} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    if state.pop("format") != FORMAT:
        raise CheckpointError(f"checkpoint {source} was written by another version of flowrl; {remedy}")
    return Checkpoint(state.pop("iteration"), load_file(source / "state.safetensors"), state)


def _fingerprint(file: Path) -> dict:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, text: str) -> None:
    """A small text file that is either the old one or the new one, never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
